"""Triton kernel for a request's keys and values: one launch copies those in pages of vLLM's cache and those of the chunk."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton.language as tl
from torch import Tensor

from flexmask.integrations.vllm.pages import PageTable
from flexmask.kernels.launch import cdiv, kernel, next_power_of_2

_TILE = 4096  # numbers that a program copies, of keys and of values each


@kernel
def _keys_and_values_kernel(
    cache,  # (pages, num_kv_heads, page_size, 2 * head_dim): keys, then values
    pages,  # (pages of the request,)
    chunk_key, chunk_value,  # (rows, num_kv_heads, head_dim)
    key, value,  # (num_kv_heads, kv_len, head_dim), written
    stride_page, stride_cache_head, stride_token, stride_key_row, stride_key_head, stride_value_row, stride_value_head,
    page_size, skipped, cached_len, kv_len,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * TILE
    head = tl.program_id(1).to(tl.int64)
    o_token = start + tl.arange(0, TILE)
    o_dim = tl.arange(0, PADDED_DIM)
    m_dim = (o_dim < HEAD_DIM)[None, :]
    o_out = (head * kv_len + o_token)[:, None] * HEAD_DIM + o_dim[None, :]
    if start < cached_len:
        # pages before `skipped` may be another request's
        m_read = (o_token >= skipped) & (o_token < cached_len)
        b_page = tl.load(pages + o_token // page_size, mask=m_read, other=0).to(tl.int64)
        b_token = b_page * stride_page + (o_token % page_size).to(tl.int64) * stride_token
        p_cache = cache + head * stride_cache_head + b_token[:, None] + o_dim[None, :]
        b_key = tl.load(p_cache, mask=m_read[:, None] & m_dim, other=0)
        b_value = tl.load(p_cache + HEAD_DIM, mask=m_read[:, None] & m_dim, other=0)
        m_cached = (o_token < cached_len)[:, None] & m_dim
        tl.store(key + o_out, b_key, mask=m_cached)
        tl.store(value + o_out, b_value, mask=m_cached)
    if start + TILE > cached_len:
        m_chunk = ((o_token >= cached_len) & (o_token < kv_len))[:, None] & m_dim
        o_row = (o_token - cached_len).to(tl.int64)[:, None]
        p_key = chunk_key + head * stride_key_head + o_row * stride_key_row + o_dim[None, :]
        p_value = chunk_value + head * stride_value_head + o_row * stride_value_row + o_dim[None, :]
        tl.store(key + o_out, tl.load(p_key, mask=m_chunk, other=0), mask=m_chunk)
        tl.store(value + o_out, tl.load(p_value, mask=m_chunk, other=0), mask=m_chunk)


def keys_and_values(cache: Tensor, page_table: PageTable, chunk: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of all of a request's tokens, (num_kv_heads, tokens, head_dim) each and contiguous, if `kernel_serves`.

    Equal to `gathered` followed by `concat_cached`: the rows of the `chunk`, (rows, num_kv_heads, head_dim) each, follow the
    cached ones, and tokens before the table's first are zero.
    """
    chunk_key, chunk_value = chunk
    rows, num_kv_heads, head_dim = chunk_key.shape
    kv_len = page_table.stop + rows
    key, value = (chunk_key.new_empty((num_kv_heads, kv_len, head_dim)) for _ in range(2))
    padded_dim = next_power_of_2(head_dim)
    tile = max(1, _TILE // padded_dim)
    _keys_and_values_kernel[(cdiv(kv_len, tile), num_kv_heads)](
        cache, page_table.page_ids, chunk_key, chunk_value, key, value, *cache.stride()[:3], *chunk_key.stride()[:2],
        *chunk_value.stride()[:2], cache.shape[2], page_table.first, page_table.stop, kv_len,
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, TILE=tile, num_warps=4,
    )  # fmt: skip
    return key, value


def compile_for(head_dims: Iterable[int], dtype: torch.dtype, device: torch.device) -> None:
    """Compile for layers with these head_dims, so that requests compile nothing."""
    # if 16 divides the head_dim, it divides all strides, and one compilation covers every memory order
    for head_dim in dict.fromkeys(head_dims):
        chunk = torch.zeros(2, 1, 1, head_dim, dtype=dtype, device=device)
        cache = torch.zeros(1, 1, 1, 2 * head_dim, dtype=dtype, device=device)
        # Triton compiles by the alignment of addresses: rows of a block table may begin at any page number
        row = torch.zeros(2, dtype=torch.int32, device=device)
        for pages in (row, row[1:]):
            keys_and_values(cache, PageTable(pages, 1), (chunk[0], chunk[1]))
