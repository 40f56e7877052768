"""Attention of a checked call: dense where the policy says so, else one group of heads after the other."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flexmask.base.checks import check_int, check_word, plain_number
from flexmask.base.inputs import AttentionInputs, HeadGroup
from flexmask.base.selection import Selected
from flexmask.dense_policy import DensePlan, DensePolicy, check_dense_below
from flexmask.flex.backend import BACKENDS, chosen_backend
from flexmask.flex.head_groups import head_groups
from flexmask.flex.heads import attend_heads
from flexmask.select import select_blocks
from flexmask.selector import Method, Selector
from flexmask.stats import SelectionStats, dense_stats, stats_of

MAX_MASK_BYTES = 2**30
EVERY_BLOCK = Method(lambda problem: None, {}, "dense")


class RunOptions(NamedTuple):
    backend: str = "auto"
    policy: DensePolicy = DensePolicy()
    max_mask_bytes: int = MAX_MASK_BYTES


class Attended(NamedTuple):
    """Attention of one call, with what was requested in addition."""

    out: Tensor  # (batch, num_heads, q_len, v_head_dim)
    lse: Tensor | None = None
    stats: SelectionStats | None = None
    selections: tuple[tuple[HeadGroup, Selected], ...] = ()  # with their maps of kept blocks


def run_options(backend: str = "auto", dense_below: int | None = None, max_mask_bytes: int = MAX_MASK_BYTES) -> RunOptions:
    """Check the options and fill in their defaults."""
    check_word("backend", backend, BACKENDS)
    max_mask_bytes = plain_number(max_mask_bytes)
    check_int("max_mask_bytes", max_mask_bytes)
    if max_mask_bytes <= 0:
        raise ValueError(f"max_mask_bytes must be > 0 bytes; got {max_mask_bytes}")
    return RunOptions(backend, DensePolicy(check_dense_below(dense_below)), max_mask_bytes)


def attend(
    inputs: AttentionInputs,
    selector: Selector,
    run: RunOptions,
    plan: DensePlan,
    return_lse: bool = False,
    statistics: tuple[str, ...] = (),
    with_maps: bool = False,
) -> Attended:
    """`sparse_attention` of checked inputs, before `with_offset`. Autocast must be off.

    `selector` is from `Selector.for_inputs`, `statistics` names of `flexmask.stats.STATISTICS`; `with_maps` also returns the
    selections with their maps of kept blocks, for pictures.
    """
    makes_masks = not all(plan.key_heads)
    # a named backend that cannot run is refused at every length
    backend = chosen_backend(run.backend, inputs, selector.block_size, return_lse, not makes_masks)
    chosen, computed = selector, statistics
    if plan.reason is not None:
        chosen, computed = Selector(EVERY_BLOCK, selector.block_size, {}), ()
    at_once = run.max_mask_bytes // selector.head_bytes if makes_masks else None
    groups = head_groups(inputs.query, inputs.key, at_once, chosen.method.shared)
    inputs = inputs.prepared() if makes_masks else inputs

    out, lse, selections, dense = None, None, [], []
    for group in groups:
        part, selected = inputs.of_heads(group), None
        if makes_masks and (computed or with_maps or not all(plan.key_heads[group.key])):
            selected = select_blocks(chosen, part, group.query, with_maps, computed)
            selections.append(selected)
        # all methods share the kernel without maps
        bare = selected if selected is None or selected.mask_mod is not None else selected.with_fields(keep=None, title=None)
        own = backend
        if bare is not None and bare.lists.kv_num_blocks.shape[1] < part.query.shape[1]:
            # FLASH then packs a key head's query heads into one tile
            own = chosen_backend(run.backend, inputs, selector.block_size, return_lse, shared=True)
        how = (own.name, return_lse, own.lse_factor)
        part_out, part_lse, is_dense = attend_heads(part, bare, plan.key_heads[group.key], plan.most_kept, *how)
        dense.append(is_dense)
        if len(groups) == 1:
            out, lse = part_out, part_lse
            break
        if out is None:
            out = part_out.new_empty((*inputs.query.shape[:3], part_out.shape[3]))
            lse = None if part_lse is None else part_lse.new_empty(inputs.query.shape[:3])
        out[group.batch, group.query] = part_out
        if lse is not None and part_lse is not None:
            lse[group.batch, group.query] = part_lse
    assert out is not None
    stats = None
    if statistics:
        found = [selected.stats for selected in selections]
        stats = dense_stats(inputs.query) if plan.reason is not None else stats_of(found, groups, dense)
    return Attended(out, lse, stats, tuple(zip(groups, selections, strict=True)) if with_maps and selections else ())
