"""Attention sinks: one logit per head in the softmax, without key and value (gpt-oss)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.flex.block_mask import block_mask_from_lists
from flexmask.flex.mask_mods import captured_number


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """`out` with log-sum-exp `lse` (batch, num_heads, q_len) rescaled by `sinks` (num_heads,); in place without gradients."""
    share = torch.sigmoid(lse - sinks.float()[:, None]).unsqueeze(-1)
    needs_grad = torch.is_grad_enabled() and (out.requires_grad or share.requires_grad)
    return (out * share).to(out.dtype) if needs_grad else out.mul_(share)


def with_sink_block(key: Tensor, value: Tensor, block_mask: BlockMask) -> tuple[Tensor, Tensor, BlockMask]:
    """Copies of key, value and mask with one more block in front, whose first key, of value 0, stands for the sinks."""
    block_size = block_mask.BLOCK_SIZE[1]
    side = captured_number(block_size, key.shape[0], key.device)
    visible = block_mask.mask_mod

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own = kv_idx - side[b]
        return (kv_idx == 0) | ((own >= 0) & visible(b, h, q_idx, own.clamp(min=0)))

    seen.__name__ = f"sinks and {visible.__name__}"
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    full_counts, full_indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if full_counts is None or full_indices is None:
        full_counts, full_indices = torch.zeros_like(counts), torch.zeros_like(indices)
    lists = (counts + 1, F.pad(indices + 1, (1, 0)), full_counts, F.pad(full_indices + 1, (0, 1)))
    q_len = block_mask.seq_lengths[0]
    shifted = block_mask_from_lists(lists, seen, block_size, (q_len, key.shape[2] + block_size))
    return F.pad(key, (0, 0, block_size, 0)), F.pad(value, (0, 0, block_size, 0)), shifted
