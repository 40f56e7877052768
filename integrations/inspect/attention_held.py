"""True attention, and what the masks of a prefill hold of it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from flexmask import plain
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import AttentionInputs, head_groups, without_autocast
from flexmask.base.scores import capped
from flexmask.base.visibility import in_blocks, num_blocks, visible_keys
from flexmask.integrations.huggingface.call import PrefillCall
from flexmask.precision import without_tf32

_MOST_SCORES = 2**24  # at once: 64 MiB in float32


class HeldAttention:
    """Serves the calls of a prefill, and compares their masks with true attention."""

    def __init__(self, heads: Collection[tuple[int, int]]) -> None:
        self._heads = heads
        self.held: dict[int, Tensor] = {}  # by layer: `held_by_quarter` of its heads
        # by layer and head, of `heads`: `block_attention`, and the map of its kept blocks
        self.maps: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, call: PrefillCall) -> Tensor:
        attended, reason = call.attend_as_planned(with_maps=True)
        if reason is None:
            inputs, block_size, held = call.inputs.prepared(), call.selector.block_size, []
            heads = head_groups(inputs.query, inputs.key, 1)
            for group, selected in attended.selections:
                part, keep = inputs.of_heads(group), selected.keep
                if keep is None:  # every visible block
                    keep = cut_into_blocks(part, block_size, plain).visible
                keep = keep.expand(part.query.shape[0], part.query.shape[1], -1, -1)
                held.append(held_by_quarter(part, keep, block_size))
                for head in range(group.query.start, group.query.stop):
                    if (call.layer, head) in self._heads and (call.layer, head) not in self.maps:
                        kept = keep[0, head - group.query.start].cpu()
                        self.maps[call.layer, head] = block_attention(inputs.of_heads(heads[head]), block_size), kept
            self.held[call.layer] = torch.cat(held)
        return attended.out


def block_attention(inputs: AttentionInputs, block_size: int, most_scores: int = _MOST_SCORES) -> Tensor:
    """Mean attention of each query block's valid rows to each key block, (num_q_blocks, num_kv_blocks) float32 on the CPU.

    `inputs` are one head of one batch row. NaN in query blocks without a valid row; with sinks rows sum to less than 1.
    """
    with torch.no_grad(), without_autocast(inputs.query.device), without_tf32():
        query, key = inputs.query[0, 0].float(), inputs.key[0, 0].float()
        q_len, kv_len = query.shape[0], key.shape[0]
        tokens = inputs.tokens()
        first, row_valid = int(tokens.offset[0]), tokens.row_valid[0]
        sums = torch.zeros((num_blocks(q_len, block_size), num_blocks(kv_len, block_size)), device=query.device)
        at_once = max(1, min(block_size, most_scores // kv_len))
        for block in range(sums.shape[0]):
            for start in range(block * block_size, min((block + 1) * block_size, q_len), at_once):
                rows = slice(start, min(start + at_once, (block + 1) * block_size, q_len))
                position = first + torch.arange(rows.start, rows.stop, device=query.device)
                visible = visible_keys(position, row_valid[rows], tokens, inputs.window)[0, :, : first + rows.stop]
                weights = _weights(inputs, query[rows], key[: first + rows.stop], visible, inputs.sinks)
                mass = in_blocks(weights.sum(0), block_size, 0.0).sum(-1)
                sums[block, : mass.shape[0]] += mass
        rows_of_block = in_blocks(row_valid.float(), block_size, 0.0).sum(-1, keepdim=True)
        return (sums / torch.where(rows_of_block > 0, rows_of_block, torch.nan)).cpu()


def held_by_quarter(inputs: AttentionInputs, keep: Tensor, block_size: int, rows: int = 8) -> Tensor:
    """Share of the true attention that kept blocks hold, mean over `rows` evenly spaced rows of each quarter of the query.

    `inputs` are one batch row, `keep` is (1, num_heads, num_q_blocks, num_kv_blocks) bool. Returns (num_heads, 4) float32 on the
    CPU, NaN in a quarter without a valid row. Sinks do not count.
    """
    with torch.no_grad(), without_autocast(inputs.query.device), without_tf32():
        query, key = inputs.query[0], inputs.key[0].float()
        num_heads, q_len, _ = query.shape
        tokens = inputs.tokens()
        sampled = ((torch.arange(4 * rows, device=query.device) + 0.5) * q_len / (4 * rows)).long()
        valid = tokens.row_valid[0, sampled]
        visible = visible_keys(tokens.offset[0] + sampled, valid, tokens, inputs.window)[0]
        per_key, shares = num_heads // key.shape[0], []
        for head in range(num_heads):
            weights = _weights(inputs, query[head, sampled].float(), key[head // per_key], visible)
            by_block = in_blocks(weights, block_size, 0.0).sum(-1)
            share = (by_block * keep[0, head, sampled // block_size]).sum(-1)
            shares.append(torch.where(valid, share, torch.nan).view(4, rows).nanmean(1))
        return torch.stack(shares).cpu()


def _weights(inputs: AttentionInputs, query: Tensor, key: Tensor, visible: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attention of rows to keys, (rows, keys) float32; 0 in rows that see nothing."""
    scores = capped(query @ key.mT * inputs.scale, inputs.softcap).masked_fill_(~visible, -torch.inf)
    largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - largest).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.float().view(1, 1) - largest).exp()
    return weights / total.clamp(min=torch.finfo(total.dtype).tiny)
