"""Attention of a group of heads over their selection, its dense key heads by SDPA."""

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
from flexmask.flex.run import run_flex_attention
from flexmask.stats import SelectionStats
from flexmask.users_mask import with_constant_numbers


class Attended(NamedTuple):
    """Attention of one call, with what was requested in addition."""

    out: Tensor  # (batch, num_heads, q_len, v_head_dim)
    lse: Tensor | None = None
    stats: SelectionStats | None = None
    selections: tuple[tuple[HeadGroup, Selection], ...] = ()  # with their maps of kept blocks
    counts: tuple[Tensor, ...] = ()  # of kept blocks, (batch, heads or 1, num_q_blocks) int32, two per group; none in dense calls

    def results(self) -> Any:
        """The output, or a tuple of it and what was requested in addition, as public functions return them."""
        extras = tuple([x for x in (self.lse, self.stats) if x is not None])
        return (self.out, *extras) if extras else self.out


_Output = tuple[Tensor, Tensor | None]  # of heads, and their log-sum-exp


def with_group(whole: _Output | None, part: _Output, group: HeadGroup, query: Tensor) -> _Output:
    """The output of all heads after that of a group was written into it; a group of all heads as it is."""
    (out, lse), shape = part, query.shape[:3]
    if out.shape[:2] == shape[:2]:
        return part
    if whole is None:
        whole = out.new_empty((*shape, out.shape[3])), None if lse is None else lse.new_empty(shape)
    whole[0][group.batch, group.query] = out
    if lse is not None and whole[1] is not None:
        whole[1][group.batch, group.query] = lse
    return whole


def attend_heads(
    inputs: PositionedInputs,
    selection: Selection | None,
    dense: tuple[bool, ...],
    most_kept: float | None,
    backend: Backend,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None, tuple[bool, ...]]:
    """Output of a group of heads, log-sum-exp or None, and the key heads that ran dense: `dense`, and those over `most_kept`."""
    if selection is not None and most_kept is not None:
        more = _keeps_more(selection.lists, len(dense), most_kept)
        dense = tuple([already or kept for already, kept in zip(dense, more, strict=True)])
    if selection is None or all(dense):
        return *dense_attention(inputs, return_lse), (True,) * len(dense)
    runs, per_key = _runs(dense), inputs.query.shape[1] // len(dense)
    heads = [slice(keys.start * per_key, keys.stop * per_key) for keys in runs]
    # not for fewer heads: another number of them is another compilation
    out, lse = _attend_to_blocks(inputs, selection.without_heads(heads) if runs else selection, backend, return_lse)
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    for of_keys, keys in zip(heads, runs, strict=True):
        out[:, of_keys] = sdpa(query[:, of_keys], key[:, keys], value[:, keys], inputs.scale, is_causal=True)
    return out, lse, dense


def _attend_to_blocks(inputs: PositionedInputs, selection: Selection, backend: Backend, return_lse: bool) -> _Output:
    if backend.direct and not is_fake(inputs.query):
        assert selection.mask_mod is None
        return flash_attention(inputs, selection.lists, selection.block_size, return_lse, backend.lse_factor)
    if selection.mask_mod is None:
        # all methods share the kernel without maps
        selection = selection.with_fields(keep=None, title=None)
    selection, numbers_are_constant = with_constant_numbers(selection, backend.name)
    with numbers_are_constant:
        return run_flex_attention(inputs, block_mask(inputs, selection), backend.name, return_lse, backend.lse_factor)


def _keeps_more(lists: BlockLists, num_kv_heads: int, share: float) -> list[bool]:
    """True for key heads whose query heads keep more than this share of a whole prompt's blocks."""
    batch, num_heads, q_blocks = lists.kv_num_blocks.shape
    if num_heads % num_kv_heads:
        return [False] * num_kv_heads  # one mask for all heads
    visible = batch * num_heads // num_kv_heads * q_blocks * (q_blocks + 1) / 2
    kept = (lists.kv_num_blocks + lists.full_kv_num_blocks).sum((0, 2)).unflatten(0, (num_kv_heads, -1)).sum(1)
    return [number > share * visible for number in kept.tolist()]


def _runs(heads: tuple[bool, ...]) -> list[slice]:
    """The runs of True entries as slices."""
    runs = [list(run) for is_true, run in groupby(range(len(heads)), key=lambda head: heads[head]) if is_true]
    return [slice(run[0], run[-1] + 1) for run in runs]
