"""A written-out stock backend with the cache of FLASH_ATTN, and steps of it; the fixtures are in `conftest`."""

from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from flexmask._torch import HAS_TRITON
from flexmask.integrations.vllm.builder import SparsePrefillBuilder
from flexmask.integrations.vllm.impl import SparsePrefillImpl
from tests.expected import rows_attention

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16
LAYER = SimpleNamespace(layer_name="model.layers.0.attn")
MIXES = {
    "all decode": [(1, 30), (1, 7)],
    "one whole prompt": [(100, 0)],
    "decoding, late chunks and whole prompts": [(1, 40), (5, 60), (70, 33), (64, 0), (1, 9), (50, 100)],
    "sparse ones between dense ones": [(40, 0), (3, 3), (90, 17), (20, 50)],
    "requests without rows at the end": [(1, 20), (64, 16), (0, 0), (0, 0)],
}


class StockBuilder:
    def __init__(self, *arguments):
        pass

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        starts, lengths = common.query_start_loc.tolist(), common.seq_lens.tolist()
        return SimpleNamespace(starts=starts, lengths=lengths, table=common.block_table_tensor, is_fast=fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata, draft_index):
        return self.build(0, common_attn_metadata, True)


class StockImpl:
    def __init__(self, num_heads, head_size, scale, num_kv_heads, sliding_window=None, sinks=None, lookback=-1, **others):
        self.scale, self.sinks, self.calls = scale, sinks, []

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        self.calls.append(attn_metadata)
        for request, (start, stop) in enumerate(pairwise(attn_metadata.starts)):
            if stop > start:
                keys, values = rows_of(kv_cache, attn_metadata.table[request], attn_metadata.lengths[request])
                output[start:stop] = rows_attention(query[start:stop], keys, values, self.scale, self.sinks)
        return output


class Builder(SparsePrefillBuilder, StockBuilder):
    pass


class Impl(SparsePrefillImpl, StockImpl):
    pass


Builder.flexmask_own = Builder


def impl_of(engine, **options):
    """An implementation with these arguments, whose role is the engine's."""
    impl = Impl(HEADS, DIM, 0.2, KV_HEADS, **options)
    layer = SimpleNamespace(impl=impl, attn_backend=SimpleNamespace(get_builder_cls=lambda: Builder))
    engine.roles[LAYER.layer_name] = impl.flexmask.role = engine.role_of(LAYER.layer_name, layer)
    return impl


def rows_of(cache, table, tokens):
    """Keys and values of one request, (tokens, KV_HEADS, DIM) each."""
    rows = torch.stack([cache[table[token // PAGE], :, token % PAGE] for token in range(tokens)])
    return rows[..., :DIM], rows[..., DIM:]


def read_by_kernel(patched):
    """Read the cache by the kernel, as on a GPU; gives a mock with the calls."""
    if not HAS_TRITON or torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    from flexmask.integrations.vllm import pages_kernel

    patched.setattr("flexmask.integrations.vllm.impl.kernel_serves", lambda cache, chunk: True)
    calls = Mock(wraps=pages_kernel.keys_and_values)
    patched.setattr(pages_kernel, "keys_and_values", calls)
    return calls


def step_of(requests, order="heads first"):
    """A step: metadata, rows, and the cache with pages in random order."""
    lengths = [context + rows for rows, context in requests]
    starts = torch.tensor([0, *(rows for rows, _ in requests)]).cumsum(0).int()
    most = max(-(-tokens // PAGE) for tokens in lengths)
    pages = torch.randperm(most * len(requests))[: most * len(requests)].view(len(requests), most).int()
    shape = (most * len(requests), KV_HEADS, PAGE, 2 * DIM)
    cache = torch.randn(shape) if order == "heads first" else torch.randn(shape[0], PAGE, KV_HEADS, 2 * DIM).transpose(1, 2)
    total = int(starts[-1])
    query, key, value = torch.randn(total, HEADS, DIM), torch.empty(total, KV_HEADS, DIM), torch.empty(total, KV_HEADS, DIM)
    for request, (rows, _) in enumerate(requests):
        keys, values = rows_of(cache, pages[request], lengths[request]) if lengths[request] else (key[:0], value[:0])
        part = slice(int(starts[request]), int(starts[request]) + rows)
        key[part], value[part] = keys[len(keys) - rows :], values[len(values) - rows :]
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths).int(),
        num_reqs=len(requests),
        num_actual_tokens=total,
        max_query_len=max(rows for rows, _ in requests),
        max_seq_len=max(lengths),
        block_table_tensor=pages,
        slot_mapping=torch.arange(total),
        seq_lens_cpu_upper_bound=torch.tensor(lengths).int(),
    )
    return common, (query, key, value, cache)


def assert_stock_outputs(parts, common, tensors):
    builder, impl = parts
    with torch.inference_mode():
        output, expected = (torch.full_like(tensors[0], float("nan")) for _ in range(2))
        impl.forward(LAYER, *tensors, builder.build(0, common), output)
        StockImpl.forward(impl, LAYER, *tensors, StockBuilder.build(builder, 0, common), expected)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
