"""One matrix over the methods: every mask in every setting."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from flexmask import block_masks
from tests.attention_calls import padding
from tests.block_masks.definitions import TESTED
from tests.cases import structured_inputs
from tests.expected import seen_pairs

# the mask function of every method
MASKS = {name.removesuffix("_mask"): getattr(block_masks, name) for name in block_masks.__all__}

SPARSE = {name: tested.sparse for name, tested in TESTED.items()}


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
    attention_mask: Tensor | None = None
    q_offset: int | Tensor | None = None
    dtype: torch.dtype = torch.float32

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        sizes = (self.batch, self.num_heads, self.num_kv_heads, self.q_len, self.kv_len, 32)
        query, key = structured_inputs(torch.Generator().manual_seed(7), *sizes)
        return query.to(device, self.dtype), key.to(device, self.dtype)

    def shared_options(self, device: torch.device | str) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in ("block_size", "window", "attention_mask", "q_offset")}
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}

    def visible(self) -> Tensor:
        """Visible pairs, from the definition: (batch, q_len, kv_len) bool."""
        offsets = torch.as_tensor(self.kv_len - self.q_len if self.q_offset is None else self.q_offset).expand(self.batch)
        tokens = torch.ones(self.batch, self.kv_len) if self.attention_mask is None else self.attention_mask
        return seen_pairs(self.q_len, offsets, tokens.bool(), self.window)


_SLOT = torch.arange(240)
HOLES = (_SLOT % 5 > 0) & ((_SLOT < torch.tensor([[24], [48]])) | (_SLOT >= torch.tensor([[48], [96]])))
SETTINGS = {
    "whole": Setting(batch=2, num_kv_heads=2),
    "ragged": Setting(q_len=333, kv_len=333, num_kv_heads=1),
    "one row": Setting(q_len=1, kv_len=63, block_size=16),
    "shorter than a block": Setting(q_len=10, kv_len=10, block_size=64),
    "chunk": Setting(q_len=129, kv_len=500, block_size=48, num_kv_heads=2),
    "bfloat16": Setting(q_len=1000, kv_len=1000, block_size=128, num_heads=2, num_kv_heads=1, dtype=torch.bfloat16),
    "left padding": Setting(batch=2, attention_mask=padding(256, ("left", 51), ("left", 102))),
    "right padding": Setting(batch=2, attention_mask=padding(256, ("right", 51), ("right", 102))),
    "holes and window": Setting(batch=2, q_len=200, kv_len=240, window=70, attention_mask=HOLES.long()),
    "window of one token": Setting(q_len=100, kv_len=100, window=1),
    "offset": Setting(q_len=100, kv_len=400, q_offset=65),
    "offsets by batch row": Setting(
        batch=3, q_len=64, kv_len=300, window=90, q_offset=torch.tensor([0, 50, 236]),
        attention_mask=padding(300, ("left", 42), ("left", 85), ("left", 128)),
    ),
}  # fmt: skip
ON_GPU = ("whole", "offsets by batch row")  # one compilation each there
# the published code takes whole, unpadded prompts only
SERVED = {"published": ("whole",)}


def serves(name: str, setting: str) -> bool:
    return setting in SERVED.get(name, (setting,))


all_masks = pytest.mark.parametrize("name", list(MASKS))
masks_and_settings = pytest.mark.parametrize(
    ("name", "setting", "device"),
    [
        *((name, setting, "cpu") for name in MASKS for setting in SETTINGS if serves(name, setting)),
        *(pytest.param(name, at, "cuda", marks=pytest.mark.gpu) for name in MASKS for at in ON_GPU if serves(name, at)),
    ],
)


class Made(NamedTuple):
    """A mask and what its mask_mod allows."""

    mask: BlockMask
    allowed: Tensor  # (batch, mask heads, q_len, kv_len) bool, on the CPU


@functools.cache
def made(name: str, setting: str, device: str = "cpu") -> Made:
    """The mask of a method in a setting in which it drops blocks."""
    chosen = SETTINGS[setting]
    mask = MASKS[name](*chosen.inputs(device), **SPARSE[name], **chosen.shared_options(device))
    allowed = create_mask(mask.mask_mod, chosen.batch, mask.shape[1], chosen.q_len, chosen.kv_len, device=device)
    return Made(mask, allowed.cpu())
