"""FLASH called without FlexAttention: flash-attn-4's forward kernel over block lists, under its own causal mask or window.

For calls whose last row is at the last key, as the kernel's own masks assume. FlexAttention would make a CuTe function of their
mask_mod in every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask._torch import HAS_TRITON, in_dispatch_mode, is_fake, is_traced, on_device
from flexmask.base.head_groups import flash_key_tile
from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import BlockLists
from flexmask.flex.last_rows import LastRows, copies, split_copies, without_last_rows
from flexmask.flex.run import with_sinks

if HAS_TRITON:
    from flexmask.kernels.last_rows import join_parts


def needs_no_mask_mod(inputs: AttentionInputs, block_size: int) -> bool:
    """True for an eager call in the kernel's blocks whose inputs, before `with_offset`, the kernel's own masks express."""
    value = inputs.value
    if value is None or inputs.needs_grad or is_traced() or in_dispatch_mode() or is_fake(inputs.query):
        return False
    is_plain = inputs.attention_mask is None and inputs.offset is None and inputs.softcap is None
    head_dim, v_head_dim = inputs.query.shape[3], value.shape[3]
    # its tile for wider heads, or under a window for those of 192, is smaller
    fits = v_head_dim <= 128 and (head_dim <= 128 or inputs.window is None)
    return is_plain and fits and block_size == 128 == flash_key_tile(head_dim, v_head_dim)


def flash_attention(
    inputs: AttentionInputs,
    lists: BlockLists,
    block_size: int,
    return_lse: bool = False,
    lse_factor: float = 1.0,
    last_rows: LastRows | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention to the listed blocks, and its log-sum-exp times `lse_factor`; the last row is at the last key.

    `last_rows` keep every visible block, without a window. They attend to the keys in parts.
    """
    needs_lse = return_lse or inputs.sinks is not None
    with on_device(inputs.query.device):
        out, lse = _forward(
            inputs, lists if last_rows is None else without_last_rows(lists, last_rows), block_size, needs_lse, lse_factor
        )
        if last_rows is not None:
            copied_inputs = inputs.with_fields(query=copies(inputs.query, last_rows), out=None)
            part_out, part_lse = _forward(copied_inputs, last_rows.lists, block_size, True, lse_factor)
            assert part_lse is not None
            rows = slice(-last_rows.rows, None)
            last_out_and_lse = out[:, :, rows], None if lse is None else lse[:, :, rows]
            join_parts(split_copies(part_out, last_rows), split_copies(part_lse, last_rows), *last_out_and_lse)
    if inputs.sinks is not None and lse is not None:
        out = with_sinks(out, lse, inputs.sinks)
    return out, lse if return_lse else None


def _forward(
    inputs: AttentionInputs, lists: BlockLists, block_size: int, return_lse: bool, lse_factor: float
) -> tuple[Tensor, Tensor | None]:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_fwd

    assert inputs.value is not None
    out, lse, *_ = _flash_attn_fwd(
        *(_in_rows_of_16_bytes(x).transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value)),
        softmax_scale=inputs.scale,
        causal=True,
        # a window beyond the first key could leave int32
        window_size_left=None if inputs.window is None else inputs.distance_limit - 1,
        block_sparse_tensors=BlockSparseTensorsTorch(*lists, block_size=(block_size, block_size)),
        return_lse=return_lse,
        out=None if inputs.out is None or not _has_rows_of_16_bytes(inputs.out) else inputs.out.transpose(1, 2),
    )
    return out.transpose(1, 2), lse if lse is None or lse_factor == 1.0 else lse * lse_factor


def _in_rows_of_16_bytes(tensor: Tensor) -> Tensor:
    return tensor if _has_rows_of_16_bytes(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _has_rows_of_16_bytes(tensor: Tensor) -> bool:
    """True if the kernel can read and write its rows; 4.0.0b9 tells neither others nor expanded ones from these."""
    *strides, last = tensor.stride()
    width = 16 // tensor.element_size()
    return last == 1 and all(stride > 0 and stride % width == 0 for stride in strides) and tensor.data_ptr() % 16 == 0
