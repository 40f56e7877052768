"""Attention of a group of heads over their selection, its dense KV heads by SDPA."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

from flexmask._torch import is_fake
from flexmask.base.inputs import HeadGroup, PositionedInputs
from flexmask.base.selection import BlockLists, Selection
from flexmask.flex.backend import Backend
from flexmask.flex.block_mask import block_mask
from flexmask.flex.dense import dense_attention, sdpa
from flexmask.flex.flash import flash_attention
from flexmask.flex.last_rows import LastRows
from flexmask.flex.run import run_flex_attention
from flexmask.stats import SelectionStats
from flexmask.users_mask import with_constant_numbers


class AttentionResult(NamedTuple):
    """The output of one call, with what was requested in addition."""

    out: Tensor  # (batch, num_heads, q_len, v_head_dim)
    lse: Tensor | None = None
    stats: SelectionStats | None = None
    selections: tuple[tuple[HeadGroup, Selection], ...] = ()  # with their maps of kept blocks
    counts: tuple[Tensor, ...] = ()  # of kept blocks, (batch, heads or 1, num_q_blocks) int32, two per group; none in dense calls

    def as_returned(self) -> Any:
        """Return the output as public functions do: by itself, or in a tuple with what was requested in addition."""
        extras = tuple([x for x in (self.lse, self.stats) if x is not None])
        return (self.out, *extras) if extras else self.out


_Output = tuple[Tensor, Tensor | None]  # output and log-sum-exp


def write_group_output(whole: _Output | None, part: _Output, group: HeadGroup, query: Tensor) -> _Output:
    """Write a group's output into that of all heads, and return the latter; a group of all heads is returned as it is."""
    (out, lse), shape = part, query.shape[:3]
    if out.shape[:2] == shape[:2]:
        return part
    if whole is None:
        whole = out.new_empty((*shape, out.shape[3])), None if lse is None else lse.new_empty(shape)
    whole[0][group.batch_rows, group.query_heads] = out
    if lse is not None and whole[1] is not None:
        whole[1][group.batch_rows, group.query_heads] = lse
    return whole


def attend_heads(
    inputs: PositionedInputs,
    selection: Selection | None,
    dense_kv_heads: tuple[bool, ...],
    break_even_density: float | None,
    backend: Backend,
    return_lse: bool = False,
    last_rows: LastRows | None = None,
) -> tuple[Tensor, Tensor | None, tuple[bool, ...]]:
    """Attend to the selection of a group of heads.

    Returns the output, the log-sum-exp or None, and the KV heads that ran dense: `dense_kv_heads`, and those whose density
    exceeds `break_even_density`. Some of the KV heads run dense only in whole prompts without padding, window, soft cap, sinks or
    log-sum-exp (`plan_call`). `last_rows` are rows that keep every visible block.
    """
    if selection is not None and break_even_density is not None:
        exceeds = _exceeds_density(selection.lists, len(dense_kv_heads), break_even_density)
        dense_kv_heads = tuple([dense or more for dense, more in zip(dense_kv_heads, exceeds, strict=True)])
    if selection is None or all(dense_kv_heads):
        return *dense_attention(inputs, return_lse), (True,) * len(dense_kv_heads)
    key_slices, queries_per_kv = _true_slices(dense_kv_heads), inputs.query.shape[1] // len(dense_kv_heads)
    assert not (key_slices and return_lse)
    query_slices = [slice(keys.start * queries_per_kv, keys.stop * queries_per_kv) for keys in key_slices]
    # all heads stay, the dense ones with empty lists: each number of heads would compile the kernel again
    sparse = selection.without_heads(query_slices) if key_slices else selection
    out, lse = _attend_to_blocks(inputs, sparse, backend, return_lse, last_rows)
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    for queries, keys in zip(query_slices, key_slices, strict=True):
        out[:, queries] = sdpa(query[:, queries], key[:, keys], value[:, keys], inputs.scale, is_causal=True)
    return out, lse, dense_kv_heads


def _attend_to_blocks(
    inputs: PositionedInputs, selection: Selection, backend: Backend, return_lse: bool, last_rows: LastRows | None
) -> _Output:
    if backend.is_direct and not is_fake(inputs.query):
        assert selection.mask_mod is None
        return flash_attention(inputs, selection.lists, selection.block_size, return_lse, backend.lse_factor, last_rows)
    if selection.mask_mod is None:
        # all methods share the kernel without maps
        selection = selection.with_fields(keep=None, title=None)
    selection, numbers_are_constant = with_constant_numbers(selection, backend.name)
    with numbers_are_constant:
        return run_flex_attention(inputs, block_mask(inputs, selection), backend.name, return_lse, backend.lse_factor)


def _exceeds_density(lists: BlockLists, num_kv_heads: int, density: float) -> list[bool]:
    """True for KV heads whose query heads keep more than this share of the visible blocks of a whole prompt."""
    batch, num_heads, q_blocks = lists.kv_num_blocks.shape
    if num_heads % num_kv_heads:
        return [False] * num_kv_heads  # one mask for all heads
    visible = batch * num_heads // num_kv_heads * q_blocks * (q_blocks + 1) / 2
    kept = (lists.kv_num_blocks + lists.full_kv_num_blocks).sum((0, 2)).unflatten(0, (num_kv_heads, -1)).sum(1)
    return [number > density * visible for number in kept.tolist()]


def _true_slices(flags: tuple[bool, ...]) -> list[slice]:
    """Slices of neighbouring True entries."""
    runs = [list(run) for is_true, run in groupby(range(len(flags)), key=lambda index: flags[index]) if is_true]
    return [slice(run[0], run[-1] + 1) for run in runs]
