"""Batches in which every prompt keeps the blocks that it keeps alone, so that a score does not depend on the batch size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexmask.integrations.huggingface.settings import PrefillSettings


def row_lengths(requests: Iterable[tuple[object, list[int], list[int]]], max_length: int, merges: bool) -> list[int]:
    """Tokens of each row that the harness makes of log-likelihood requests, in the order of its batches: the longest first.

    Parameters
    ----------
    requests
        (key, tokens of the context, tokens of the continuation). Of both together the model reads all but the last.
    max_length
        The harness cuts rows to their last `max_length` tokens.
    merges
        True if requests that differ in the last token alone share a row (the harness's `logits_cache`).
    """
    rows = [(*context, *continuation[:-1]) for _, context, continuation in requests]
    return sorted((min(len(row), max_length) for row in (set(rows) if merges else rows)), reverse=True)


def rows_alike(lengths: Sequence[int], settings: PrefillSettings, padded_left: bool, on_cpu: bool = False) -> list[list[int]]:
    """Split the rows of a padded batch into parts that run together.

    `dense_below` looks at the length of the batch: a short prompt would run sparse next to a long one, so the two part. On the
    left, padding moves a prompt against the grid of blocks unless it is a multiple of the block, so sparse prompts part by their
    length modulo the block. On the right it moves nothing. On CPUs, where dense attention may serve a head that keeps most of its
    blocks, that is decided over the batch, and not under padding: there they run one by one, unless `dense_below` is 0.

    Parameters
    ----------
    lengths
        Tokens of each row, without padding.
    settings
        The options.
    padded_left
        True if the padding comes first.
    on_cpu
        True if the model runs on a CPU.

    Returns
    -------
    list of lists
        Indices of rows, ascending within a part; the parts in the order of their first row.
    """
    policy = settings.run_options.policy
    parts: dict[tuple[object, ...], list[int]] = {}
    for row, length in enumerate(lengths):
        dense = policy.by_size(length, length) is not None
        shift = length % settings.block_size if padded_left and not dense else None
        single = row if on_cpu and policy.dense_below > 0 and not dense else None
        parts.setdefault((dense, shift, single), []).append(row)
    return list(parts.values())
