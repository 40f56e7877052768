"""Builder and implementation around a written-out stock backend, with the cache of FLASH_ATTN and vLLM's own splitting."""

import logging
import weakref
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")

from vllm.v1.attention.backend import CommonAttentionMetadata

from flexmask._torch import HAS_TRITON
from flexmask.integrations.serving.options import ServingOptions
from flexmask.integrations.vllm.builder import SparsePrefillBuilder
from flexmask.integrations.vllm.engine import engine_of
from flexmask.integrations.vllm.impl import SparsePrefillImpl
from flexmask.settings import PrefillSettings
from tests.expected import rows_attention
from tests.vllm.configs import config_of

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16
LAYER = SimpleNamespace(layer_name="model.layers.0.attn")


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


def rows_of(cache, table, tokens):
    """Keys and values of one request, (tokens, KV_HEADS, DIM) each."""
    rows = torch.stack([cache[table[token // PAGE], :, token % PAGE] for token in range(tokens)])
    return rows[..., :DIM], rows[..., DIM:]


@pytest.fixture
def config(monkeypatch):
    made = config_of({"gamma": 1.0, "block_size": 32, "dense_below": 0})
    monkeypatch.setattr("flexmask.integrations.vllm.impl.get_current_vllm_config", lambda: made)
    monkeypatch.setattr("flexmask.integrations.vllm.engine._tensor_parallel_rank", lambda: (0, 1))
    return made


@pytest.fixture
def engine(config):
    made = engine_of(config)
    made.prepare = Mock()
    return made


@pytest.fixture
def parts(config, engine):
    impl = type("Impl", (SparsePrefillImpl, StockImpl), {})(HEADS, DIM, 0.2, KV_HEADS, lookback=-1, indexer=None)
    impl.flexmask_settle(LAYER.layer_name)
    builder_class = type("Builder", (SparsePrefillBuilder, StockBuilder), {})
    builder_class.flexmask_own = builder_class
    return builder_class(None, [LAYER.layer_name], config, torch.device("cpu")), impl


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


MIXES = {
    "all decode": [(1, 30), (1, 7)],
    "one whole prompt": [(100, 0)],
    "decoding, late chunks and whole prompts": [(1, 40), (5, 60), (70, 33), (64, 0), (1, 9), (50, 100)],
    "sparse ones between dense ones": [(40, 0), (3, 3), (90, 17), (20, 50)],
    "requests without rows at the end": [(1, 20), (64, 16), (0, 0), (0, 0)],
}


def assert_stock_outputs(parts, common, tensors):
    builder, impl = parts
    with torch.inference_mode():
        output, expected = (torch.full_like(tensors[0], float("nan")) for _ in range(2))
        impl.forward(LAYER, *tensors, builder.build(0, common), output)
        StockImpl.forward(impl, LAYER, *tensors, StockBuilder.build(builder, 0, common), expected)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.attention
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
@pytest.mark.parametrize("mix", MIXES)
def test_every_row_attends_to_its_own_keys(mix, order, parts, engine):
    assert_stock_outputs(parts, *step_of(MIXES[mix], order))
    sparse = sum(rows for rows, _ in MIXES[mix] if rows >= 32)
    assert (engine.counters.sparse_tokens, engine.counters.steps) == (sparse, sparse > 0)
    # parts get no ahead-of-time schedule
    assert all(each.is_fast for each in parts[1].calls[:-1] if sparse)


@pytest.mark.attention
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
def test_the_kernel_s_keys_are_those_that_torch_gathers(order, parts, engine, monkeypatch):
    engine.attend = Mock(wraps=engine.attend)
    common, tensors = step_of(MIXES["decoding, late chunks and whole prompts"], order)
    assert_stock_outputs(parts, common, tensors)
    calls = read_by_kernel(monkeypatch)
    assert_stock_outputs(parts, common, tensors)
    assert calls.call_count == 2  # the whole prompt has no page
    keys_and_values = [call.args[3:5] for call in engine.attend.call_args_list]
    for one, other in zip(keys_and_values[:3], keys_and_values[3:], strict=True):
        assert all(map(torch.equal, one, other))


def test_what_the_kernel_cannot_read_is_gathered(parts, engine, monkeypatch):
    """FP8 caches, and those of which a mixin reads the pages itself."""
    builder, impl = parts
    calls = read_by_kernel(monkeypatch)
    engine.attend = Mock(return_value=torch.zeros(70, HEADS, DIM))
    common, (query, key, value, cache) = step_of([(70, 33)])
    gathered = []

    class Reader:
        def flexmask_gather(self, *given):
            gathered.append(given)
            return super().flexmask_gather(*given)

    reader = type("Impl", (Reader, *type(impl).__bases__), {})(HEADS, DIM, 0.2, KV_HEADS)
    in_fp8 = type(impl)(HEADS, DIM, 0.2, KV_HEADS, kv_cache_dtype="fp8")
    one = torch.ones(1)
    layer = SimpleNamespace(layer_name=LAYER.layer_name, _q_scale=one, _k_scale=one, _v_scale=one)
    with torch.inference_mode():
        for each, its_cache in ((reader, cache), (in_fp8, cache.to(torch.float8_e4m3fn).view(torch.uint8))):
            each.forward(layer, query, key, value, its_cache, builder.build(0, common), torch.empty_like(query))
    assert (len(gathered), calls.call_count, engine.attend.call_count) == (1, 0, 2)


@pytest.mark.attention
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("junk", [float("nan"), -50.0])
def test_pages_before_the_window_are_not_read(junk, by_kernel, parts, engine, monkeypatch):
    """They are free: empty, or those of another request."""
    if by_kernel:
        read_by_kernel(monkeypatch)
    builder, impl = parts
    engine.options = ServingOptions(PrefillSettings(gamma=0.2, min_budget=32, block_size=32, dense_below=0))
    engine.attend = Mock(wraps=engine.attend)
    engine.roles.clear()
    impl = type(impl)(HEADS, DIM, 0.2, KV_HEADS, sliding_window=150)
    common, (query, key, value, cache) = step_of([(96, 230), (64, 40)])
    metadata, outputs = builder.build(0, common), []
    with torch.inference_mode():
        for _ in range(2):
            outputs.append(impl.forward(LAYER, query, key, value, cache, metadata, torch.empty_like(query)))
            # the first row sees 81 and later: 5 pages are free
            cache[common.block_table_tensor[0, :5].long()] = junk
    assert engine.counters.density is not None and engine.counters.density < 0.9
    assert torch.equal(*outputs)
    # masks too
    keys = [call.args[3] for call in engine.attend.call_args_list]
    assert len(keys) == 4 and all(map(torch.equal, keys[:2], keys[2:]))


@pytest.mark.attention
def test_an_fp8_cache_and_quantized_queries_are_scaled(parts):
    """As FLASH_ATTN's kernels get them, with scales by key head."""
    builder, impl = parts
    impl = type(impl)(HEADS, DIM, 0.2, KV_HEADS, kv_cache_dtype="fp8")
    scales = {name: torch.tensor(pair) for name, pair in (("q", [0.5, 0.25]), ("k", [0.06, 0.03]), ("v", [0.1, 0.2]))}
    layer = SimpleNamespace(layer_name=LAYER.layer_name, **{f"_{name}_scale": scale for name, scale in scales.items()})
    common, (query, key, value, cache) = step_of([(70, 33), (64, 0)])
    own = torch.cat([scale.view(-1, 1, 1).expand(-1, 1, DIM) for scale in (scales["k"], scales["v"])], -1)
    stored = (cache / own).to(torch.float8_e4m3fn)
    numbers, by_head = stored.float() * own, scales["q"].repeat_interleave(HEADS // KV_HEADS)[:, None]
    quantized = (query / by_head).to(torch.float8_e4m3fn)
    with torch.inference_mode():
        output = torch.empty_like(query)
        impl.forward(layer, quantized, key, value, stored.view(torch.uint8), builder.build(0, common), output)
    exact = quantized.float() * by_head
    # rounded before the chunk, and the step's own rows
    both = zip(rows_of(numbers, common.block_table_tensor[0], 33), (key[:70], value[:70]), strict=True)
    later = rows_attention(exact[:70], *(torch.cat(each) for each in both), 0.2)
    torch.testing.assert_close(output[:70], later, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output[70:], rows_attention(exact[70:], key[70:], value[70:], 0.2), rtol=1e-4, atol=1e-5)
    # FP8 rounds what neither of them reads
    for read in (numbers, cache):
        assert (later - rows_attention(exact[:70], *rows_of(read, common.block_table_tensor[0], 103), 0.2)).abs().max() > 1e-2


def test_drafts_graphs_wrappers_and_stock_layers_get_no_plan(parts, config, engine, caplog):
    builder, _ = parts
    common, _ = step_of(MIXES["one whole prompt"])
    for build in (builder.build_for_cudagraph_capture, lambda given: builder.build_for_drafting(given, 0)):
        assert not hasattr(build(common), "flexmask_step")
        assert hasattr(builder.build(0, common), "flexmask_step")
    engine.counters.log_to(logging.getLogger("vllm.tests"), 60.0)
    derived = type("Derived", (type(builder),), {})(None, [LAYER.layer_name], config, torch.device("cpu"))
    assert not hasattr(derived.build(0, common), "flexmask_step")
    assert caplog.messages == ["flexmask: attention runs stock: Derived shows layers other requests"]
    engine.roles["stock"] = "in dense_layers"
    of_stock_layers = type(builder)(None, ["stock"], config, torch.device("cpu"))
    assert not hasattr(of_stock_layers.build(0, common), "flexmask_step")
    verifying = common.replace(is_prefilling=torch.tensor([False]))
    assert builder.build(0, verifying).flexmask_step.split.sparse == ()


@pytest.mark.parametrize(
    ("change", "scale", "reason"),
    [
        ({"causal": False}, 0.2, "attention of a step is not causal"),
        ({"seq_lens_cpu_upper_bound": None}, 0.2, "the host has no lengths of a step"),
        ({"mm_req_doc_ranges": {0: [(3, 9)]}}, 0.2, "a step has images that see later tokens"),
        # set in every forward of vLLM's Transformers backend
        ({}, 1.0, "a layer made with scale 0.2 has scale 1"),
    ],
)
def test_steps_that_run_stock_count_as_dense_and_say_why(change, scale, reason, parts, engine, caplog):
    builder, impl = parts
    impl.scale = scale
    engine.counters.log_to(logging.getLogger("vllm.tests"), 60.0)
    common, tensors = step_of(MIXES["sparse ones between dense ones"])
    for _ in range(2):
        assert_stock_outputs(parts, common.replace(**change), tensors)
    assert (engine.counters.steps, engine.counters.sparse_tokens, engine.counters.dense_tokens) == (0, 0, 2 * 153)
    assert caplog.messages == [f"flexmask: attention runs stock: {reason}"]
    # models that take images name each request's images
    assert builder.build(0, common.replace(mm_req_doc_ranges={0: []})).flexmask_step.split.sparse


# a batch padded for a CUDA graph has no rows of its last request, and vLLM 0.33 no entry either
@pytest.mark.parametrize("is_prefilling", [None, (True, False, True, False, False), (True, False, True, False)])
def test_a_step_of_short_rows_is_counted_without_a_list_of_requests(is_prefilling, parts, engine, monkeypatch):
    builder, _ = parts
    common, _ = step_of([(1, 40), (5, 60), (7, 33), (1, 9), (0, 0)])
    if is_prefilling is not None:
        common = common.replace(is_prefilling=torch.tensor(is_prefilling))
    builder._policy = builder._policy._replace(least_rows=7)
    by_request = builder.build(0, common).flexmask_step.split
    assert by_request.sparse
    builder._policy = builder._policy._replace(least_rows=8)
    monkeypatch.setattr(engine, "split", None)
    split = builder.build(0, common).flexmask_step.split
    assert split.sparse == () and split.dense_tokens == by_request.sparse_tokens + by_request.dense_tokens


def test_the_keys_of_one_request_are_gone_before_those_of_the_next(parts, monkeypatch):
    builder, impl = parts
    common, tensors = step_of([(90, 17), (70, 33)])
    made, alive, gather = [], [], impl.flexmask_gather

    def watched(*given):
        alive.append(sum(each() is not None for each in made))
        found = gather(*given)
        made.extend(map(weakref.ref, found))
        return found

    def attended(role, request, query, key, value, sinks):
        alive.append(sum(each() is not None for each in made))
        made.extend(map(weakref.ref, (key, value)))
        return torch.zeros_like(query)

    monkeypatch.setattr(impl, "flexmask_gather", watched)
    monkeypatch.setattr(impl.flexmask_engine, "attend", attended)
    with torch.inference_mode():
        impl.forward(LAYER, *tensors, builder.build(0, common), torch.empty_like(tensors[0]))
    assert alive == [0] * 4


def test_the_kernel_s_keys_of_one_request_are_gone_before_those_of_the_next(parts, monkeypatch):
    builder, impl = parts
    read = read_by_kernel(monkeypatch)
    common, tensors = step_of([(90, 17), (70, 33)])
    made, alive = [], []

    def attended(role, request, query, key, value, sinks):
        made.extend(map(weakref.ref, (key, value)))
        return torch.zeros_like(query)

    def watched(*given):
        alive.append(sum(each() is not None for each in made))
        return DEFAULT

    read.side_effect = watched
    monkeypatch.setattr(impl.flexmask_engine, "attend", attended)
    with torch.inference_mode():
        impl.forward(LAYER, *tensors, builder.build(0, common), torch.empty_like(tensors[0]))
    assert alive == [0] * 2 and len(made) == 4


def test_memory_is_measured_before_the_first_step(parts, engine):
    _, impl = parts
    engine.prepare.reset_mock()
    output = torch.zeros(3, HEADS, DIM)
    with pytest.raises(AttributeError):  # the stock backend here has no such run of its own
        impl.forward(LAYER, output, output, output, torch.empty(0), None, output)
    engine.prepare.assert_called_once_with(output.device, in_profile=True)
