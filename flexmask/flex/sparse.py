"""Block-sparse attention, group of heads by group, so that the masks of one group exist at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import HAS_CPU_KERNEL
from flexmask.base.inputs import AttentionInputs, HeadGroup
from flexmask.flex.backend import chosen_backend
from flexmask.flex.block_mask import with_gradients
from flexmask.flex.dense import dense_attention
from flexmask.flex.dense_heads import attend_densely, query_heads, without_heads
from flexmask.flex.head_groups import head_groups
from flexmask.flex.run import run_flex_attention
from flexmask.stats import FlexPrefillStats, empty_stats, write_stats


class HeadPlan(NamedTuple):
    """The mask of one group of heads, and which of them dense attention serves instead."""

    mask: BlockMask | None  # None where dense attention serves them all
    stats: FlexPrefillStats | None = None
    dense: tuple[slice, ...] = ()  # key heads, with their query heads; not where gradients or the log-sum-exp are wanted


MakeMask = Callable[[AttentionInputs], HeadPlan]
Result = tuple[Tensor, Tensor | None, FlexPrefillStats | None]


def attention_by_groups(
    inputs: AttentionInputs, make_mask: MakeMask, block_size: int, at_once: int, backend: str, return_lse: bool = False
) -> Result:
    """Attention under the masks that `make_mask` makes, `at_once` heads at a time.

    Parameters
    ----------
    inputs
        A problem, which need not be placed. What its hidden keys and values hold does not matter, NaN included.
    make_mask
        From the problem of one group of heads to its plan, with a mask in blocks of `block_size`.
    at_once
        Heads, of all batch rows, in a group at most; at least one query head is.
    backend
        As in `flexprefill_attention`.

    Returns
    -------
    tuple
        Output, log-sum-exp (None without `return_lse`) and statistics (None if the plans have none).
    """
    grad = inputs.wants_gradients()
    kernel = chosen_backend(backend, inputs, block_size, return_lse)
    if kernel == "cpu":
        _check_cpu(grad, return_lse)
    if not grad:
        # FlexAttention's CPU kernel refuses leaves that require gradients even where gradients are off
        inputs = inputs.detached()
    # scores of hidden keys are replaced, but the backward pass multiplies by those keys, as the forward pass by their values
    inputs = inputs.without_absent(keys=grad).placed()
    batch, num_heads = inputs.query.shape[:2]
    groups = head_groups(batch, num_heads, inputs.key.shape[1], at_once)

    def attend(part: AttentionInputs) -> Result:
        mask, stats, dense = make_mask(part)
        if mask is None:
            return dense_attention(part)[0], None, stats
        if dense:
            mask = without_heads(mask, [query_heads(part, each) for each in dense])
        out, lse = run_flex_attention(part, with_gradients(mask) if grad else mask, kernel, return_lse)
        attend_densely(out, part, dense)
        return out, lse, stats

    return attend(inputs) if len(groups) == 1 else _joined(inputs, groups, attend)


def _check_cpu(grad: bool, return_lse: bool) -> None:
    """Refuse what FlexAttention's CPU kernel cannot do."""
    if grad:
        raise ValueError("query, key, value and sinks must not require gradients on a CPU; call under torch.no_grad()")
    if return_lse:
        raise NotImplementedError("return_lse is not there on CPUs: FlexAttention's CPU kernel has no log-sum-exp")
    if not HAS_CPU_KERNEL:
        raise NotImplementedError(
            f"FlexAttention runs on CPUs from torch 2.6 on; got torch {torch.__version__}. "
            "Use a newer torch or a GPU, or let the call run dense by dense_below"
        )


def _joined(inputs: AttentionInputs, groups: list[HeadGroup], attend: Callable[[AttentionInputs], Result]) -> Result:
    """Attention of all heads, each group written to its place before the next is begun."""
    query, value = inputs.query, inputs.value
    assert value is not None
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    lse: Tensor | None = None
    stats: FlexPrefillStats | None = None
    for group in groups:
        part, part_lse, part_stats = attend(inputs.of_heads(group))
        out[group.batch, group.query] = part
        if part_lse is not None:
            lse = part_lse.new_empty(query.shape[:3]) if lse is None else lse
            lse[group.batch, group.query] = part_lse
        if part_stats is not None:
            stats = empty_stats(query, dense=False) if stats is None else stats
            write_stats(stats, group, part_stats)
    return out, lse, stats
