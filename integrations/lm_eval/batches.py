"""Batches in which every prompt keeps the same blocks as in a batch of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexmask.settings import PrefillSettings


def row_lengths(requests: Iterable[tuple[object, list[int], list[int]]], max_length: int, merges: bool) -> list[int]:
    """Tokens of each row that the harness makes of log-likelihood requests, in the order of its batches: longest first.

    Requests are (key, context tokens, continuation tokens); rows lack the last token. With `merges` (the harness's
    `logits_cache`) requests that differ only in it share a row.
    """
    rows = [(*context, *continuation[:-1]) for _, context, continuation in requests]
    return sorted((min(len(row), max_length) for row in (set(rows) if merges else rows)), reverse=True)


def rows_alike(lengths: Sequence[int], settings: PrefillSettings, padded_left: bool, on_cpu: bool = False) -> list[list[int]]:
    """Split the rows of a padded batch, by their lengths, into parts that run together: ascending indices of rows.

    Dense prompts part from sparse ones, since `dense_below` applies to the length of the batch. Left padding shifts a prompt
    against the grid of blocks: sparse prompts part by their length modulo the block. On CPUs, where single heads may run dense by
    a decision over the whole batch, sparse prompts run one by one unless `dense_below` is 0.
    """
    policy = settings.run_options.policy
    parts: dict[tuple[object, ...], list[int]] = {}
    for row, length in enumerate(lengths):
        dense = policy.by_size(length, length) is not None
        shift = length % settings.block_size if padded_left and not dense else None
        single = row if on_cpu and policy.dense_below > 0 and not dense else None
        parts.setdefault((dense, shift, single), []).append(row)
    return list(parts.values())
