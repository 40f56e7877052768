"""Attention of one group of heads: some by SDPA, the others over their blocks.

The mask has all heads, since every number of heads would be another compilation. Dense heads have empty lists, which the
sparse kernel skips; SDPA fills their outputs.
"""

from __future__ import annotations

from itertools import groupby

from torch import Tensor

from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import BlockLists, Selected
from flexmask.flex.block_mask import block_mask
from flexmask.flex.captured_numbers import constant_floats, with_constant_numbers
from flexmask.flex.dense import dense_attention
from flexmask.flex.run import run_flex_attention
from flexmask.flex.visible import sdpa


def attend_heads(
    inputs: AttentionInputs,
    selected: Selected | None,
    dense: list[bool],
    most_kept: float | None,
    backend: str,
    return_lse: bool = False,
    lse_factor: float = 1.0,
) -> tuple[Tensor, Tensor | None, list[bool]]:
    """Output, log-sum-exp or None, and the key heads that ran dense.

    `inputs` are `with_offset`; of a whole prompt without anything special where only some key heads are `dense`. `selected` is
    None if all are. `most_kept` is the density above which others run dense too.
    """
    if selected is not None and most_kept is not None:
        more = _keeps_more(selected.lists, len(dense), most_kept)
        dense = [already or kept for already, kept in zip(dense, more, strict=True)]
    runs, groups = _runs(dense), inputs.query.shape[1] // len(dense)
    heads = [slice(keys.start * groups, keys.stop * groups) for keys in runs]
    if selected is None or all(dense):
        return *dense_attention(inputs, return_lse), [True] * len(dense)
    selected = with_constant_numbers(selected, backend)
    mask = block_mask(inputs, selected.without_heads(heads) if runs else selected)
    with constant_floats(selected):
        out, lse = run_flex_attention(inputs, mask, backend, return_lse, lse_factor)
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    for own, keys in zip(heads, runs, strict=True):
        out[:, own] = sdpa(query[:, own], key[:, keys], value[:, keys], inputs.scale, is_causal=True)
    return out, lse, dense


def _keeps_more(lists: BlockLists, num_kv_heads: int, share: float) -> list[bool]:
    """For each key head: its query heads keep more than this share of a whole prompt's blocks."""
    batch, num_heads, q_blocks = lists.kv_num_blocks.shape
    if num_heads % num_kv_heads:
        return [False] * num_kv_heads  # one mask for all heads
    visible = batch * num_heads // num_kv_heads * q_blocks * (q_blocks + 1) / 2
    kept = (lists.kv_num_blocks + lists.full_kv_num_blocks).sum((0, 2)).unflatten(0, (num_kv_heads, -1)).sum(1)
    return [number > share * visible for number in kept.tolist()]


def _runs(heads: list[bool]) -> list[slice]:
    """The runs of True entries as slices."""
    runs = [list(run) for is_true, run in groupby(range(len(heads)), key=lambda head: heads[head]) if is_true]
    return [slice(run[0], run[-1] + 1) for run in runs]
