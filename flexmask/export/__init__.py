"""Selections for other kernels: a BlockMask as the maps and lists that they read, and back."""

from flexmask.export.bsr import BsrBlocks as BsrBlocks
from flexmask.export.bsr import to_bsr as to_bsr
from flexmask.export.flash_attn import FlashBlocks as FlashBlocks
from flexmask.export.flash_attn import to_flash_attn as to_flash_attn
from flexmask.export.flashinfer import FlashInferBlocks as FlashInferBlocks
from flexmask.export.flashinfer import to_flashinfer as to_flashinfer
from flexmask.export.imported import from_block_map as from_block_map
from flexmask.export.imported import from_index_list as from_index_list
from flexmask.export.index_lists import to_block_map as to_block_map
from flexmask.export.index_lists import to_index_list as to_index_list

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
