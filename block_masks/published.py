"""The block sets of FlexPrefill's published code, for parity."""

from __future__ import annotations

from typing import Any

import torch

from flexmask import plain
from flexmask.base.inputs import AttentionInputs
from flexmask.base.options import blocks_of, check_budgets
from flexmask.base.selection import Selection
from flexmask.block_masks.flexprefill import check_gamma_and_tau, plain_bytes
from flexmask.method import BlockProblem, ByHead, method
from flexmask.plain.block_lists import block_lists
from flexmask.plain.pattern import estimated_attention
from flexmask.plain.published import published_selection
from flexmask.plain.query_aware import pooled_map
from flexmask.plain.vertical_slash import blocks_kept_always, extended_lines


def _check(*, gamma: Any, tau: Any, min_budget: int, max_budget: int | None, **_: Any) -> None:
    check_gamma_and_tau(gamma, tau)
    check_budgets(min_budget, max_budget)


def _check_call(problem: AttentionInputs, *, block_size: int, **_: Any) -> None:
    """Refuse what the published code cannot do."""
    offset = problem.offset if problem.query.shape[2] == problem.key.shape[2] else None
    for name, value in (
        ("softcap", problem.softcap),
        ("window", problem.window),
        ("attention_mask", problem.attention_mask),
        ("q_offset", offset),
    ):
        if value is not None:
            raise ValueError(f"method 'published' takes no {name}; use method 'flexprefill'")
    q_len, kv_len = problem.query.shape[2], problem.key.shape[2]
    if q_len != kv_len or q_len % block_size != 0:
        raise ValueError(
            f"method 'published' needs a whole prompt of a multiple of block_size ({block_size}) tokens; got q_len {q_len} and "
            f"kv_len {kv_len}"
        )


def _head_bytes(problem: AttentionInputs, block_size: int, by_kernels: bool, *, tau: float, **_: Any) -> int:
    # sums by offset take int64 indices
    return plain_bytes(problem, block_size, 72 if tau > 0 else 56, 32)


@method(steps=("plain",), check=_check, check_call=_check_call, head_bytes=_head_bytes)
def published_mask(
    problem: BlockProblem, gamma: ByHead = 0.95, tau: float = 0.1, *, min_budget: int = 1024, max_budget: int | None = None
) -> Selection:
    """The block sets of FlexPrefill's published code, for whole unpadded prompts of a multiple of the block.

    `flexmask.plain.published` lists how it differs from `flexprefill_mask`.

    Source: github.com/bytedance/FlexPrefill at a24b27b, described in our own words by what it keeps.

    Differs from the published code: scores are float32 (it rounds them to the input's dtype, which moves a few heads in
    bfloat16); its dense shortcut for short prompts is left out; at gamma 1 rounding does not decide.

    Parameters
    ----------
    query, key
        As in `flexprefill_mask`, of equal length.
    gamma, tau, min_budget, max_budget
        As in `flexprefill_mask`; the budgets bound the counts of key blocks and of block diagonals, in blocks.
    block_size, scale, return_stats
        As in `flexprefill_mask`.
    softcap, window, attention_mask, q_offset
        Refused.

    Returns
    -------
    BlockMask, SelectionStats
        As `flexprefill_mask`.

    Raises
    ------
    TypeError, ValueError
        As `flexprefill_mask`, and for what the published code cannot do.

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> published_mask(query, key, gamma=0.9, block_size=64, min_budget=128).shape
    (1, 4, 512, 512)
    """
    size, tokens, inputs, seen = problem.block_size, problem.tokens, problem.inputs, problem.seen
    budget = (blocks_of(min_budget, size) or 0, blocks_of(max_budget, size))
    shares = (problem.as_tensor(gamma), problem.as_tensor(tau))
    last = plain.representative_mass(problem, "last")
    key_means = problem.key_means()
    # the published scores have no term for the number of keys
    counts = torch.ones_like(problem.key_counts())
    estimated = estimated_attention(inputs, last.rows, key_means, counts, tokens, size)
    pooled = pooled_map(inputs, key_means, counts, tokens, seen, size)
    chosen = published_selection(last.attention, estimated, pooled, shares, budget)
    keep = extended_lines(chosen.vertical, chosen.slash, seen) | chosen.query_aware
    keep = (keep | blocks_kept_always(seen)[:, None]) & seen.visible[:, None]
    return Selection(
        block_lists(keep, seen.full),
        keep,
        {
            "is_query_aware": lambda: chosen.is_query_aware,
            "js_distance": lambda: chosen.distance,
            "num_vertical_blocks": lambda: chosen.num_vertical,
            "num_slash_blocks": lambda: chosen.num_slash,
            "coverage": lambda: plain.coverage(problem, last, keep),
        },
    )
