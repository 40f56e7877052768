"""The error of every head at every gamma, from one pass over the scores of a layer.

Each block's sums of exponentials and of values are computed once; a gamma adds one small matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.inputs import AttentionInputs, SparseInputs, head_groups, without_autocast
from flexmask.base.scores import capped, widest_float
from flexmask.base.visibility import block_visibility, whole_blocks
from flexmask.precision import without_tf32
from flexmask.select import select_blocks
from flexmask.selector import CallSelector, Selector

_UNSEEN = -1e30  # largest score of a block that a row does not see; finite, for differences


class HeadErrors(NamedTuple):
    """By head and gamma."""

    visible: int  # blocks that each head sees
    density: list[list[float]]  # kept blocks / visible blocks
    error: list[list[float]]  # ||sparse - dense||^2 / ||dense||^2 of the head's output, or of the loss with a gradient


def head_errors(
    inputs: AttentionInputs, selector: Selector, gammas: Sequence[float], max_mask_bytes: int, gradient: Tensor | None = None
) -> tuple[Tensor, HeadErrors]:
    """Dense attention of a whole prompt in query's dtype, and each head's density and error at each gamma.

    `inputs` are one prompt without padding, as many rows as keys. An error is the relative squared error of the output, or with
    the `gradient` (1, num_heads, q_len, v_head_dim) of a loss the sum over tokens of ``(gradient . (sparse - dense))^2``.
    """
    query, value = inputs.query, inputs.value
    assert value is not None
    num_heads, q_len = query.shape[1:3]
    with torch.no_grad(), without_autocast(query.device), without_tf32():
        whole = inputs.with_fields(needs_grad=False).prepared()
        by_gamma = [replace(selector, options={**selector.options, "gamma": gamma}).for_inputs(whole) for gamma in gammas]
        out = query.new_empty((1, num_heads, q_len, value.shape[3]))
        visible = block_visibility(whole.tokens(), selector.block_size, inputs.window).visible
        density = torch.empty((num_heads, len(gammas)), dtype=widest_float(query.device), device=query.device)
        error = torch.empty_like(density)
        at_once = max_mask_bytes // max(with_gamma.head_bytes(whole) for with_gamma in by_gamma)
        for group in head_groups(query, whole.key, at_once, selector.method.shared):
            part = whole.of_heads(group)
            keep = torch.stack([_kept(with_gamma.of_heads(group.query), part, visible) for with_gamma in by_gamma], 2)[0]
            density[group.query] = keep.sum((-2, -1)).to(density.dtype) / visible.sum()
            for one in head_groups(part.query, part.key, num_heads // inputs.key.shape[1]):  # of one key head
                heads = slice(group.query.start + one.query.start, group.query.start + one.query.stop)
                weight = None if gradient is None else gradient[0, heads]
                error[heads] = errors_of_key_head(part.of_heads(one), keep[one.query], selector.block_size, out[0, heads], weight)
    return out, HeadErrors(int(visible.sum()), density.tolist(), error.tolist())


def _kept(selector: CallSelector, inputs: SparseInputs, visible: Tensor) -> Tensor:
    """(1, num_heads, num_q_blocks, num_kv_blocks) bool."""
    if all(selector.keeps_all):
        return visible[:, None].expand(-1, inputs.query.shape[1], -1, -1)
    keep = select_blocks(selector, inputs, with_map=True).keep
    assert keep is not None
    return keep


def errors_of_key_head(
    inputs: AttentionInputs, keep: Tensor, block_size: int, out: Tensor, gradient: Tensor | None = None
) -> Tensor:
    """Errors of the query heads of one key head, (num_heads, gammas); writes their dense output to `out`.

    `keep` is (num_heads, gammas, num_q_blocks, num_kv_blocks) bool, `gradient` (num_heads, q_len, v_head_dim).
    """
    assert inputs.value is not None
    query = inputs.query[0].float()
    key = whole_blocks(inputs.key[0, 0].float(), 0, block_size)
    value = whole_blocks(inputs.value[0, 0].float(), 0, block_size)
    error, norm = (torch.zeros(keep.shape[:2], dtype=widest_float(keep.device), device=keep.device) for _ in range(2))
    for block, rows in enumerate(query.split(block_size, 1)):
        start = block * block_size
        first = 0 if inputs.window is None else max(0, start - inputs.window + 1) // block_size
        seen = slice(first, block + 1)
        row = torch.arange(start, start + rows.shape[1], device=key.device)[:, None]
        column = torch.arange(first * block_size, start + block_size, device=key.device)
        hidden = column > row
        if inputs.window is not None:
            hidden |= column <= row - inputs.window
        # the last choice is dense attention
        chosen = torch.cat([keep[:, :, block, seen], torch.ones_like(keep[:, :1, block, seen])], 1)
        outs = _outputs(inputs, rows, key[seen], value[seen], hidden, chosen)
        dense = outs[:, -1:]
        out[:, start : start + block_size] = dense[:, 0].to(out.dtype)
        change = outs[:, :-1] - dense
        if gradient is None:
            error += change.square().sum((-2, -1))
        else:
            change.mul_(gradient[:, None, start : start + block_size].float())
            error += change.sum(-1).square().sum(-1)
        norm += dense.square().sum((-2, -1))
    if gradient is not None:
        return error
    # a head whose values are all zero has no error
    return error / norm.clamp(min=torch.finfo(norm.dtype).tiny)


def _outputs(inputs: AttentionInputs, rows: Tensor, key: Tensor, value: Tensor, hidden: Tensor, chosen: Tensor) -> Tensor:
    """Attention of one query block under each choice of key blocks, (num_heads, choices, rows, v_head_dim) float32.

    `key` and `value` are (blocks, block_size, head_dim), `rows` (num_heads, rows, head_dim), `chosen` (num_heads, choices,
    blocks) bool, which includes the diagonal block.
    """
    num_heads, num_rows = rows.shape[:2]
    scores = capped(rows.flatten(0, 1) @ key.flatten(0, 1).mT * inputs.scale, inputs.softcap)
    scores = scores.unflatten(0, (num_heads, num_rows)).masked_fill_(hidden, -torch.inf)
    weights = scores.reshape(num_heads * num_rows, *key.shape[:2])
    largest = weights.amax(-1, keepdim=True).clamp(min=_UNSEEN)
    weights = weights.sub_(largest).exp_()
    # per block: sums of exponentials and of values, relative to its largest score
    totals = weights.sum(-1)
    sums = torch.bmm(weights.transpose(0, 1), value)

    by_choice = largest.view(num_heads, 1, num_rows, -1).masked_fill(~chosen.unsqueeze(2), -torch.inf)
    top = by_choice.amax(-1, keepdim=True)
    shares = (by_choice - top).exp_()
    total = (shares * totals.view(num_heads, 1, num_rows, -1)).sum(-1, keepdim=True)
    if inputs.sinks is not None:
        total = total + (inputs.sinks.float().view(-1, 1, 1, 1) - top).exp()
    # per row (choices, blocks) by (blocks, v_head_dim)
    out = torch.bmm(shares.transpose(1, 2).flatten(0, 1), sums.transpose(0, 1))
    return out.unflatten(0, (num_heads, num_rows)).transpose(1, 2) / total
