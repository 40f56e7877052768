"""From query and key to the kept blocks of every head, and to their BlockMask."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import Selected
from flexmask.flex.block_mask import block_mask
from flexmask.numbers import numbers_of
from flexmask.run_method import run_method
from flexmask.selector import Selector


def mask_of(selector: Selector, inputs: AttentionInputs, statistics: tuple[str, ...] = ()) -> tuple[BlockMask, Selected]:
    """The mask of inputs `with_offset`, its block choice in the mask_mod too, and its selection."""
    selected = select_blocks(selector, inputs, with_map=True, statistics=statistics)
    return block_mask(inputs, selected), selected


def select_blocks(
    selector: Selector,
    inputs: AttentionInputs,
    heads: slice | None = None,
    with_map: bool = False,
    statistics: tuple[str, ...] = (),
) -> Selected:
    """Choose the blocks of every head, outside of autograd. Autocast must be off.

    `selector` is from `Selector.for_inputs` of the whole call, `heads` are those of the call that `inputs` hold (default: all),
    `with_offset`.
    """
    with torch.no_grad():
        numbers = numbers_of(selector, inputs.query, heads)
        return run_method(selector, inputs, numbers, with_map, statistics)
