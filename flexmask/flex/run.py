"""Block-sparse attention by FlexAttention's compiled kernel, with sinks (gpt-oss), and in narrower blocks of keys for FLASH."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flexmask._torch import is_fake, is_traced, runs_flex_attention_uncompiled
from flexmask.base.head_groups import flash_key_tile
from flexmask.base.inputs import AttentionInputs
from flexmask.base.scores import capped
from flexmask.base.visibility import num_blocks
from flexmask.compilation import compiled
from flexmask.flex.block_mask import block_mask_from_lists, captured, captured_number
from flexmask.flex.dense import sdpa


def run_flex_attention(
    inputs: AttentionInputs, block_mask: BlockMask, backend: str, return_lse: bool = False, lse_factor: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Block-sparse attention by the compiled kernel; its log-sum-exp is multiplied by `lse_factor` (`chosen_backend`)."""
    if runs_flex_attention_uncompiled():
        # breaks the surrounding graph (an error with fullgraph)
        return _outside_the_graph(inputs, block_mask, backend, return_lse, lse_factor)
    query, key, value, sinks = inputs.query, inputs.key, inputs.value, inputs.sinks
    assert value is not None
    if not is_traced() and is_fake(query):
        # compiled code cannot read it; SDPA for the sake of its gradient
        out = sdpa(query, key, value, inputs.scale) if inputs.needs_grad else query.new_empty((*query.shape[:3], value.shape[3]))
        return out, query.new_empty(query.shape[:3], dtype=torch.float32) if return_lse else None
    scale, softcap = inputs.scale, inputs.softcap
    on_cpu, head_dim = backend == "cpu", query.shape[3]
    on_nvidia = query.is_cuda and torch.version.hip is None
    on_hopper = on_nvidia and torch.cuda.get_device_capability(query.device)[0] == 9
    for_inference_on_hopper = on_hopper and not inputs.needs_grad
    if backend == "flash" and for_inference_on_hopper:
        block_mask = in_key_tiles(block_mask, flash_key_tile(head_dim, value.shape[3]))
    sizes = (block_mask.BLOCK_SIZE[0], head_dim, value.shape[3])
    options = kernel_options(backend, *sizes, query.dtype, for_inference_on_hopper)
    ends = None
    if on_cpu:
        # where no log-sum-exp can rescale the output
        sinks = None if sinks is None else captured(sinks.float().contiguous())
        key, value, block_mask, ends = with_added_key(key, value, block_mask)
    numbers = (query.shape[1], key.shape[1], head_dim, value.shape[3], block_mask.BLOCK_SIZE, scale, softcap)
    tiles = None if options is None else tuple(options.items())
    needs_lse = return_lse or (sinks is not None and not on_cpu)
    query_kind = (query.device.type, query.device.index, query.dtype, f"batch {query.shape[0]}")
    has_sinks = on_cpu and sinks is not None
    run = compiled(_flex_attention, (*numbers, tiles), *query_kind, backend, needs_lse, block_mask.mask_mod.__name__, has_sinks)
    out, lse = run(query, key, value, block_mask, scale, softcap, options, needs_lse, ends, sinks if on_cpu else None)
    if lse is not None and lse_factor != 1.0:
        lse = lse * lse_factor
    if sinks is not None and lse is not None:
        out = with_sinks(out, lse, sinks)
    return out, lse if return_lse else None


_outside_the_graph = torch.compiler.disable(run_flex_attention)


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    scale: float,
    softcap: float | None,
    options: dict[str, Any] | None,
    return_lse: bool,
    ends: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    # arguments one by one: unread fields of a tuple would be guarded too
    if not is_traced():
        raise RuntimeError(
            "torch.compile is switched off (TORCH_COMPILE_DISABLE, a compiler stance or torch._dynamo.config.disable): "
            "flex_attention would run uncompiled and ignore the block lists. Switch it on, or call dense attention."
        )

    def cap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return capped(score, softcap)

    def cap_to_the_end(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert ends is not None
        kv_end, added_position = ends
        score = capped(score, softcap)
        # the kernel's maximum drops NaN, and with it the row's whole block; of infinity its softmax makes NaN. Not isnan, which
        # Inductor computes one by one
        score = torch.where(score == score, score, math.inf)
        added_score = -math.inf if sinks is None else torch.where(kv_idx == added_position[b], sinks[h], -math.inf)
        return torch.where(kv_idx < kv_end[b], score, added_score)

    score_mod = cap_to_the_end if ends is not None else None if softcap is None else cap
    enable_gqa = query.shape[1] != key.shape[1]
    run = functools.partial(flex_attention, query, key, value, score_mod, block_mask, scale, enable_gqa)
    if return_lse:
        out, lse = run(return_lse=True, kernel_options=cast(Any, options))
        return out, lse
    return run(kernel_options=cast(Any, options)), None


def kernel_options(
    backend: str, block_size: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, has_hopper_tiles: bool = False
) -> dict[str, Any] | None:
    """Options of the kernel: Triton's tiles must divide the block, and wide rows share 227 KiB (docs/performance.md)."""
    if backend == "flash":
        return {"BACKEND": "FLASH"}
    if backend == "cpu":
        return None
    largest, row_bytes = block_size & -block_size, max(head_dim, v_head_dim) * dtype.itemsize
    padded_dim = 1 << (max(head_dim, v_head_dim) - 1).bit_length()
    if block_size % 128 == 0 and row_bytes <= 512:
        if not has_hopper_tiles or dtype.itemsize != 2 or head_dim in (64, 128) or padded_dim < 128:
            return None
        # the fastest of those tried, with as many stages as fit; torch chooses others as well
        stages = 3 if padded_dim == 128 or (head_dim, v_head_dim) == (192, 128) else 2
        return {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": stages, "num_warps": 8}
    wide = 32 if row_bytes <= (1024 if has_hopper_tiles else 512) else 16
    tile = min(64 if row_bytes <= 256 else wide, largest)
    return {"BLOCK_M": tile, "BLOCK_N": tile} | ({"num_stages": 2} if row_bytes > 256 else {})


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Rescale `out` by `sinks`, (num_heads,), given its log-sum-exp, (batch, num_heads, q_len); in place without gradients."""
    share = torch.sigmoid(lse - sinks.float()[:, None]).unsqueeze(-1)
    needs_grad = torch.is_grad_enabled() and (out.requires_grad or share.requires_grad)
    return (out * share).to(out.dtype) if needs_grad else out.mul_(share)


def with_added_key(key: Tensor, value: Tensor, block_mask: BlockMask) -> tuple[Tensor, Tensor, BlockMask, tuple[Tensor, Tensor]]:
    """Copies of key, value and mask with one more key, of value 0, at the start of the next block; kv_len and its position.

    Every query block lists this block last, as full. The key carries the sinks. On CPUs it also makes the kernel subtract a row's
    largest score so far from itself, so that an infinite score becomes NaN.
    """
    kv_len, block_size = key.shape[2], block_mask.BLOCK_SIZE[1]
    next_block = num_blocks(kv_len, block_size)
    kv_end, added_position = (captured_number(n, key.shape[0], key.device) for n in (kv_len, next_block * block_size))
    visible = block_mask.mask_mod

    def visible_before_end(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < kv_end[b]) & visible(b, h, q_idx, torch.minimum(kv_idx, kv_end[b] - 1))

    visible_before_end.__name__ = visible.__name__
    full_counts, full_indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    assert full_counts is not None and full_indices is not None
    full_indices = F.pad(full_indices, (0, 1)).scatter(-1, full_counts.unsqueeze(-1).long(), next_block)
    lists = (block_mask.kv_num_blocks, F.pad(block_mask.kv_indices, (0, 1)), full_counts + 1, full_indices)
    added_keys = next_block * block_size + 1 - kv_len
    longer = block_mask_from_lists(lists, visible_before_end, block_size, (block_mask.seq_lengths[0], kv_len + added_keys))
    return F.pad(key, (0, 0, 0, added_keys)), F.pad(value, (0, 0, 0, added_keys)), longer, (kv_end, added_position)


def in_key_tiles(mask: BlockMask, tile: int) -> BlockMask:
    """A mask of the same pairs, by `tile` keys; `mask` itself unless its blocks are multiples of `tile`. Reads no value."""
    rows, columns = mask.BLOCK_SIZE
    if columns == tile or columns % tile:
        return mask
    lengths = mask.seq_lengths
    counts, indices = _narrow(mask.kv_num_blocks, mask.kv_indices, columns // tile, num_blocks(lengths[1], tile))
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    full = _narrow(mask.full_kv_num_blocks, mask.full_kv_indices, columns // tile, indices.shape[-1])
    return block_mask_from_lists((counts, indices, *full), mask.mask_mod, (rows, tile), lengths)


def _narrow(counts: Tensor, indices: Tensor, parts: int, existing: int) -> tuple[Tensor, Tensor]:
    """Counts and indices of the parts of each listed block; `existing` parts exist."""
    entry = torch.arange(existing, device=indices.device)
    # in place: lists are large
    listed = indices.index_select(-1, entry // parts).mul_(parts).add_((entry % parts).to(indices.dtype))
    listed.clamp_(max=existing - 1)  # behind the count
    # indices ascend: what the last key block lacks is the end of its list
    last = indices.gather(-1, (counts - 1).clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    lacking = ((last + 1) * parts - existing).clamp(min=0).to(counts.dtype)
    return torch.where(counts > 0, counts * parts - lacking, 0).to(counts.dtype), listed
