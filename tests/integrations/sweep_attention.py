"""FlexAttention written out, for the sweep: compiling 189 shapes would take hours."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

import flexmask.flex.run


def write_out() -> None:
    """Replace the compiled attention in this process."""
    flexmask.flex.run.compiled = lambda function, *variant: _attention  # type: ignore[attr-defined]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    scale: float,
    limit: float | str | None,
    options: dict[str, Any] | None,
    return_lse: bool,
    sinks: Tensor | None,
) -> tuple[Tensor, None]:
    """Attention over the listed blocks under the mask_mod; the kernel's arguments."""
    assert not return_lse, "CPUs have no log-sum-exp"
    batch, heads, q_len, _ = query.shape
    kv_len, groups = key.shape[2], heads // key.shape[1]
    blocks = block_mask.to_dense().bool()
    listed = blocks.repeat_interleave(block_mask.BLOCK_SIZE[0], 2).repeat_interleave(block_mask.BLOCK_SIZE[1], 3)
    visible = create_mask(block_mask.mask_mod, batch, heads, q_len, kv_len, device=query.device)
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query.float() @ key.float().mT * scale
    if limit is not None:
        scores = float(limit) * torch.tanh(scores / float(limit))
    if sinks is not None:  # their block is the first
        scores[..., 0] = sinks[:, None]
    scores = scores.masked_fill(~(visible & listed[..., :q_len, :kv_len]), -torch.inf)
    return (torch.softmax(scores, -1).nan_to_num() @ value.float()).to(query.dtype), None
