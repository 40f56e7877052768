"""Selections for other kernels: a BlockMask as the maps and lists that they read, and back."""

from flexmask.export.bsr import BsrBlocks, to_bsr
from flexmask.export.flash_attn import FlashBlocks, to_flash_attn
from flexmask.export.flashinfer import FlashInferBlocks, to_flashinfer
from flexmask.export.imported import from_block_map, from_index_list
from flexmask.export.index_lists import to_block_map, to_index_list

__all__ = [
    "BsrBlocks",
    "FlashBlocks",
    "FlashInferBlocks",
    "from_block_map",
    "from_index_list",
    "to_block_map",
    "to_bsr",
    "to_flash_attn",
    "to_flashinfer",
    "to_index_list",
]
