"""One matrix over the gallery: every mask in every setting, what makes it sparse, and what makes it keep everything.

A new mask is tested by adding it to `MASKS`; what makes it sparse, and what makes it keep everything, goes into the tables here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from flexmask.block_masks import MASKS
from tests.cases import structured_inputs
from tests.comparisons import dense_map

# by mask: options under which it leaves something out of a short prompt, and options under which it leaves out nothing
SPARSE: dict[str, dict[str, Any]] = {
    "causal": {},
    "flash_prefill": {"alpha": 1.0, "sink_blocks": 1, "window_blocks": 1, "last_blocks": 1},
    "flexprefill": {"gamma": 0.5, "min_budget": 0},
    "hip": {"topk_blocks": 2, "sink_blocks": 1, "window_blocks": 1},
    "infllm": {"topk_blocks": 1, "local_tokens": 40, "execution_blocks": 2},
    "lm_infinite": {"global_tokens": 5, "local_tokens": 50},
    "minference": {"plan": (30, 64)},
    "moa": {"plan": (40, 0.2)},
    "oracle": {"gamma": 0.6},
    "sparge": {"similarity_threshold": 0.1, "cdf_threshold": 0.5},
    "streaming_llm": {"sink_blocks": 1, "window_blocks": 2},
    "tri_shape": {"sink_blocks": 1, "window_blocks": 2, "last_blocks": 1},
    "vertical_slash": {"vertical_size": 64, "slash_size": 64},
    "xattention": {"stride": 4, "threshold": 0.6},
}
KEEP_EVERYTHING: dict[str, dict[str, Any]] = {
    "causal": {},
    "flash_prefill": {"alpha": 0.0},
    "flexprefill": {"gamma": 1.0},
    "hip": {"topk_blocks": 64},
    "infllm": {"topk_blocks": 64},
    "lm_infinite": {"local_tokens": 10**6},
    "minference": {"plan": (10**6, 0)},
    "moa": {"plan": (0, 1.0)},
    "oracle": {"gamma": 1.0},
    "sparge": {"cdf_threshold": 1.0},
    "streaming_llm": {"window_blocks": 10**6},
    "tri_shape": {"last_blocks": 10**6},
    "vertical_slash": {"slash_size": 10**6},
    "xattention": {"threshold": 1.0},
}


@dataclass(frozen=True)
class Setting:
    """Sizes and the options that all masks share."""

    batch: int = 1
    num_heads: int = 4
    num_kv_heads: int = 4
    q_len: int = 256
    kv_len: int = 256
    block_size: int = 32
    window: int | None = None
    padding: str | None = None  # left, right or holes
    q_offset: int | tuple[int, ...] | None = None  # a tuple becomes a tensor
    dtype: torch.dtype = torch.float32

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(7)
        query, key = structured_inputs(
            generator, self.batch, self.num_heads, self.num_kv_heads, self.q_len, self.kv_len, head_dim=32
        )
        return query.to(device, self.dtype), key.to(device, self.dtype)

    def shared_options(self, device: torch.device | str) -> dict[str, Any]:
        offset: Any = self.q_offset
        if isinstance(offset, tuple):
            offset = torch.tensor(offset, device=device)
        return {
            "block_size": self.block_size,
            "window": self.window,
            "attention_mask": self.attention_mask(device),
            "q_offset": offset,
        }

    def attention_mask(self, device: torch.device | str) -> Tensor | None:
        if self.padding is None:
            return None
        valid = torch.ones(self.batch, self.kv_len, dtype=torch.int64, device=device)
        cut = torch.arange(1, self.batch + 1) * self.kv_len // (2 * self.batch + 1)
        for row, length in zip(valid, cut.tolist(), strict=True):
            if self.padding == "left":
                row[:length] = 0
            elif self.padding == "right":
                row[-length:] = 0
            else:
                row[length // 2 : length] = 0
                row[::5] = 0
        return valid

    def visible(self) -> Tensor:
        """Visible pairs, from the definition: (batch, q_len, kv_len) bool."""
        offset = self.kv_len - self.q_len if self.q_offset is None else self.q_offset
        position = torch.tensor(offset).expand(self.batch)[:, None] + torch.arange(self.q_len)  # (batch, q_len)
        distance = position[:, :, None] - torch.arange(self.kv_len)
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        valid = self.attention_mask("cpu")
        if valid is not None:
            valid = valid.bool()
            visible &= valid[:, None, :] & valid.gather(1, position)[:, :, None]
        return visible


SETTINGS = {
    "whole": Setting(batch=2, num_kv_heads=2),
    "ragged": Setting(q_len=333, kv_len=333, num_kv_heads=1),
    "one row": Setting(q_len=1, kv_len=63, block_size=16),
    "shorter than a block": Setting(q_len=10, kv_len=10, block_size=64),
    "chunk": Setting(q_len=129, kv_len=500, block_size=48, num_kv_heads=2),
    "bfloat16": Setting(q_len=1000, kv_len=1000, block_size=128, num_heads=2, num_kv_heads=1, dtype=torch.bfloat16),
    "left padding": Setting(batch=2, padding="left"),
    "right padding": Setting(batch=2, padding="right"),
    "holes and window": Setting(batch=2, q_len=200, kv_len=240, window=70, padding="holes"),
    "window of one token": Setting(q_len=100, kv_len=100, window=1),
    "offset": Setting(q_len=100, kv_len=400, q_offset=65),
    "offsets by batch row": Setting(batch=3, q_len=64, kv_len=300, q_offset=(0, 50, 236), window=90, padding="left"),
}
ON_GPU = ("whole", "offsets by batch row")  # one compilation each there

settings = pytest.mark.parametrize("setting", list(SETTINGS))
settings_and_devices = pytest.mark.parametrize(
    ("setting", "device"),
    [
        *((setting, "cpu") for setting in SETTINGS),
        *(pytest.param(setting, "cuda", marks=pytest.mark.gpu) for setting in ON_GPU),
    ],
)
all_masks = pytest.mark.parametrize("name", list(MASKS))


class Made(NamedTuple):
    """A mask and what its mask_mod allows."""

    mask: BlockMask
    allowed: Tensor  # (batch, mask heads, q_len, kv_len) bool, on the CPU


@functools.cache
def made(name: str, setting: str, device: str = "cpu") -> Made:
    chosen = SETTINGS[setting]
    mask = MASKS[name](*chosen.inputs(device), **SPARSE[name], **chosen.shared_options(device))
    allowed = create_mask(mask.mask_mod, chosen.batch, mask.shape[1], chosen.q_len, chosen.kv_len, device=device)
    return Made(mask, allowed.cpu())


def lists_of(mask: BlockMask) -> tuple[Tensor, ...]:
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices


def num_blocks(length: int, block_size: int) -> int:
    return -(-length // block_size)


def block_map(counts: Tensor, indices: Tensor) -> Tensor:
    """Bool map of the blocks listed, each at most once."""
    return dense_map(counts.cpu(), indices.cpu())


def by_block(pairs: Tensor, block_size: int, reduction: str, fill: bool) -> Tensor:
    """`any` or `all` over the blocks of a map of pairs, whose tails are filled."""
    q_len, kv_len = pairs.shape[-2:]
    blocks = num_blocks(q_len, block_size), num_blocks(kv_len, block_size)
    padding = (0, blocks[1] * block_size - kv_len, 0, blocks[0] * block_size - q_len)
    tiles = F.pad(pairs, padding, value=fill).unflatten(-2, (blocks[0], block_size)).unflatten(-1, (blocks[1], block_size))
    tiles = tiles.transpose(-3, -2).flatten(-2)
    return tiles.any(-1) if reduction == "any" else tiles.all(-1)


def check_lists(mask: BlockMask, allowed: Tensor) -> None:
    """The lists name every block with an allowed pair, once, and call full only those without a hidden one."""
    block_size = mask.BLOCK_SIZE[0]
    partial, full = block_map(*lists_of(mask)[:2]), block_map(*lists_of(mask)[2:])
    assert not (partial & full).any(), "a block is in both lists"
    assert torch.equal(partial | full, by_block(allowed, block_size, "any", False))
    assert not (full & ~by_block(allowed, block_size, "all", True)).any(), "a full block has hidden pairs"
