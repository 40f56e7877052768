"""Random selections as masks, and the pairs that they keep by definition."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.export import from_block_map
from tests.expected import by_block, seen_pairs

SHAPES = {
    "one token": (1, 1, 16), "63": (63, 63, 16), "129": (129, 129, 32), "129 in one block": (129, 129, 256),
    "chunk at a block": (40, 72, 32), "chunk inside a block": (50, 129, 32), "one row of many": (1, 100, 16),
}  # fmt: skip
LONG = {"1000": (1000, 1000, 128), "chunk of 1000": (200, 1000, 64)}


def over_tokens(blocks: Tensor, sizes: tuple[int, int], lengths: tuple[int, int]) -> Tensor:
    return blocks.repeat_interleave(sizes[0], -2).repeat_interleave(sizes[1], -1)[..., : lengths[0], : lengths[1]]


@dataclass
class Drawn:
    """A mask, its kept blocks, the pairs that may be seen, (batch, 1, q_len, kv_len) bool, and those of kept blocks."""

    mask: BlockMask
    keep: Tensor
    visible: Tensor
    pairs: Tensor


def drawn(shape, heads=3, batch=1, window=None, padded=False, offset=None, empty=(), seed=0):
    """A random selection, with its diagonals, of which heads in `empty` keep nothing."""
    q_len, kv_len, size = shape
    tokens = torch.ones(batch, kv_len, dtype=torch.bool)
    if padded:
        tokens[0, : kv_len // 3] = False
    offsets = torch.full((batch,), kv_len - q_len if offset is None else offset)
    visible = seen_pairs(q_len, offsets, tokens, window)[:, None]
    position = offsets[:, None] + torch.arange(q_len)
    own = by_block(torch.arange(kv_len) // size == (position // size)[:, None, :, None], size)
    chosen = torch.rand(batch, heads, *own.shape[2:], generator=torch.Generator().manual_seed(seed)) < 0.4
    keep = (chosen | own) & by_block(visible, size)
    keep[:, list(empty)] = False
    scores = {"window": window, "attention_mask": tokens.long() if padded else None, "q_offset": offset}
    mask = from_block_map(keep, q_len, kv_len, block_size=size, **scores)
    return Drawn(mask, keep, visible, over_tokens(keep, (size, size), (q_len, kv_len)) & visible)
