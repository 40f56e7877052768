"""Selections for other kernels: a BlockMask as the maps and lists that they read, and back."""

from flexmask.export.imported import from_block_map, from_index_list
from flexmask.export.index_lists import to_block_map, to_index_list
from flexmask.export.layouts import BsrBlocks, FlashBlocks, FlashInferBlocks, to_bsr, to_flash_attn, to_flashinfer

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
