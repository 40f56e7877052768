"""Steps of SGLang's own ForwardBatch, layer, pools and torch_native backend."""

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flexmask
from flexmask.integrations.serving.options import ServingOptions
from flexmask.settings import PrefillSettings

pytest.importorskip("sglang", reason="`make test-sglang` has it in an environment of its own")

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from flexmask.integrations.sglang import backend as module
from flexmask.integrations.sglang import prefill as prefill_module
from flexmask.integrations.sglang import step as step_module
from flexmask.integrations.sglang.backend import sparse
from flexmask.integrations.sglang.prefill import Prefill

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 32, 4096
KEEP_ALL = PrefillSettings(gamma=1.0, block_size=32, dense_below=0)
OPTIONS: dict[str, Any] = {"gamma": 0.5, "min_budget": 32, "block_size": 32, "dense_below": 0}
SPARSE = PrefillSettings(**OPTIONS)
pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


class Model(torch.nn.Module):
    def __init__(self, **others):
        super().__init__()
        self.attn = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0, **others)


class Served:
    """One layer's cache, a backend over it, and requests in steps."""

    def __init__(self, settings=None, count_density=True, cache=torch.float32, kernel="torch_native", **layer):
        torch.manual_seed(0)
        self.model = Model(**layer)
        self.pool = MHATokenToKVPool(SLOTS, 1, cache, KV_HEADS, DIM, 1, "cpu", False)
        self.requests = ReqToTokenPool(8, 2048, "cpu", False)
        self.runner = SimpleNamespace(
            device="cpu",
            dtype=torch.float32,
            model=self.model,
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.requests,
        )
        self.backend = TorchNativeAttnBackend(self.runner)
        if settings is not None:
            self.prefill = Prefill(self.runner, ServingOptions(settings, kernel, count_density=count_density))
            self.backend = sparse(self.backend, TorchNativeAttnBackend(self.runner), self.prefill)
        # slots of requests are mixed in the cache
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
        self.requests.req_to_token[:8, :512] = order.view(8, 512).int()

    def step(self, chunks, mode=ForwardMode.EXTEND, padding=0, is_written=False, **others):
        """Attention of one step; `chunks` are (request, tokens before, rows). `is_written`: another kernel filled the cache."""
        places, before, rows = (list(each) for each in zip(*chunks, strict=True))
        slots = [self.requests.req_to_token[p, b : b + r] for p, b, r in chunks]
        query, key, value = (
            torch.cat([self.data(kind, p)[b : b + r] for p, b, r in chunks] + [torch.zeros(padding, heads * DIM)])
            for kind, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS))
        )
        lengths = torch.tensor(before) + torch.tensor(rows)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.zeros(sum(rows), dtype=torch.int64),
            req_pool_indices=torch.tensor(places),
            seq_lens=lengths,
            out_cache_loc=torch.cat(slots).long(),
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths,
            extend_num_tokens=sum(rows),
            extend_seq_lens=torch.tensor(rows),
            extend_prefix_lens=torch.tensor(before),
            extend_start_loc=torch.tensor(rows).cumsum(0) - torch.tensor(rows),
            extend_seq_lens_cpu=rows,
            extend_prefix_lens_cpu=before,
            rids=[str(place) for place in places],
        )
        for name, each in others.items():
            setattr(batch, name, each)
        self.backend.init_forward_metadata(batch)
        key, value = (x.view(-1, KV_HEADS, DIM) for x in (key, value))
        if is_written:
            self.pool.set_kv_buffer(self.model.attn, batch.out_cache_loc, key, value)
        return self.backend.forward(query, key, value, self.model.attn, batch, not is_written)

    @staticmethod
    def data(kind, request):
        heads = HEADS if kind == "query" else KV_HEADS
        seed = torch.Generator().manual_seed(request + 100 * ["query", "key", "value"].index(kind))
        return torch.randn(512, heads * DIM, generator=seed) * (2 if kind == "query" else 1)


# long and short prompts, later chunks among them, and decoding rows at the end
STEPS = (
    [(0, 0, 200)],
    [(1, 0, 20), (2, 0, 130), (0, 200, 77)],
    [(0, 277, 100), (3, 0, 15), (2, 130, 64), (1, 20, 1)],
    [(0, 377, 1), (1, 21, 1), (2, 194, 90), (4, 0, 60)],
)


def outputs(served, **options):
    modes = [ForwardMode.EXTEND, *[ForwardMode.MIXED] * (len(STEPS) - 1)]
    return [served.step(chunks, mode, **options) for chunks, mode in zip(STEPS, modes, strict=True)]


def test_gamma_one_gives_the_stock_backend_s_outputs_and_cache():
    stock, ours = Served(), Served(KEEP_ALL)
    for out, wanted in zip(outputs(ours), outputs(stock), strict=True):
        assert out.shape == wanted.shape
        torch.testing.assert_close(out, wanted)
    for read in ("get_key_buffer", "get_value_buffer"):
        assert torch.equal(getattr(ours.pool, read)(0), getattr(stock.pool, read)(0))
    counters = ours.prefill.counters
    assert (counters.sparse_tokens, counters.dense_tokens) == (200 + 207 + 164 + 150, 20 + 15)
    assert counters.density == pytest.approx(1)


def test_a_cache_that_another_kernel_wrote_is_only_read(monkeypatch):
    """As qwen3_moe's rotary embedding does on CUDA."""
    stock, ours = Served(), Served(KEEP_ALL)
    wanted, written = outputs(stock), []
    write = ours.pool.set_kv_buffer

    def counting(layer, loc, *rest):
        written.append(len(loc))
        write(layer, loc, *rest)

    monkeypatch.setattr(ours.pool, "set_kv_buffer", counting)
    for out, right in zip(outputs(ours, is_written=True), wanted, strict=True):
        torch.testing.assert_close(out, right)
    # once, of the whole step
    assert written == [sum(rows for *_, rows in chunks) for chunks in STEPS]
    assert ours.prefill.counters.sparse_tokens == 200 + 207 + 164 + 150


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_cache_rounds_only_what_was_there_before_the_chunk(cache):
    stock, ours = Served(cache=cache), Served(KEEP_ALL, cache=cache)
    assert ours.prefill.sparse_layers
    for number, (chunks, out, rounded) in enumerate(zip(STEPS, *map(outputs, (ours, stock)), strict=True)):
        start = 0
        for request, before, rows in chunks:
            own = slice(start, start + rows)
            wanted = rounded[own]
            if rows >= KEEP_ALL.block_size:
                wanted = attention(request, before, rows, lambda x: x.to(cache).float())
            torch.testing.assert_close(out[own], wanted, msg=lambda told, number=number: f"step {number}: {told}")
            start += rows
    for read in ("get_key_buffer", "get_value_buffer"):
        assert torch.equal(getattr(ours.pool, read)(0).float(), getattr(stock.pool, read)(0).float())


def attention(request, before, rows, rounded):
    """Of one chunk, (rows, HEADS * DIM), behind `before` tokens whose keys and values are rounded."""
    query, key, value = (
        Served.data(kind, request)[: before + rows].view(1, before + rows, -1, DIM).transpose(1, 2)
        for kind in ("query", "key", "value")
    )
    key, value = (torch.cat([rounded(x[:, :, :before]), x[:, :, before:]], 2) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out[0, :, before:].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("kind", [torch.tensor, float])
def test_scales_of_an_fp8_cache(kind):
    """A model with a file of scales (--quantization-param-path) has floats."""
    ours = Served(KEEP_ALL, cache=torch.float8_e4m3fn, kernel="fa3")
    ours.model.attn.k_scale = ours.model.attn.v_scale = kind(0.03)
    for before, rows in ((0, 200), (200, 100)):
        # writing a chunk's own keys and values, which the pool divides in place, must not change them
        wanted = attention(0, before, rows, lambda x: (x / 0.03).to(torch.float8_e4m3fn).float() * 0.03)
        torch.testing.assert_close(ours.step([(0, before, rows)]), wanted)


def test_gamma_below_one_is_sparse_attention_of_the_same_chunks():
    ours = Served(SPARSE)
    for chunks, out in zip(STEPS, outputs(ours), strict=True):
        start = 0
        for request, before, rows in chunks:
            if rows >= SPARSE.block_size:
                query, key, value = (
                    ours.data(kind, request)[:stop].view(1, -1, heads, DIM).transpose(1, 2)
                    for kind, heads, stop in (
                        ("query", HEADS, before + rows),
                        ("key", KV_HEADS, before + rows),
                        ("value", KV_HEADS, before + rows),
                    )
                )
                wanted = flexmask.sparse_attention(query[:, :, before:], key, value, method="hybrid", **OPTIONS)
                found = out[start : start + rows].view(1, rows, HEADS, DIM).transpose(1, 2)
                torch.testing.assert_close(found, wanted)
            start += rows
    assert 0.1 < ours.prefill.counters.density < 0.99


def test_padding_rows_are_zero():
    out = Served(KEEP_ALL).step([(0, 0, 200)], padding=24)
    assert out.shape[0] == 224
    assert torch.count_nonzero(out[:200]) and not torch.count_nonzero(out[200:])


def test_an_output_that_sglang_gives_is_written_into():
    given = torch.full((200, HEADS * DIM), math.nan)
    out = Served(KEEP_ALL).step([(0, 0, 200)], _attn_output=given)
    assert out.data_ptr() == given.data_ptr() and not given.isnan().any()


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ({"sliding_window_size": 63}, "a sliding window of 64"),
        ({"logit_cap": 30.0, "logit_capping_method": "other"}, "a soft cap by other"),
        ({"pos_encoding_mode": "ALIBI"}, "positions of kind ALIBI"),
        ({"use_irope": True}, "chunked local attention"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"v_head_dim": 16}, "values 16 wide beside keys 32 wide"),
    ],
)
def test_layers_that_are_not_served_have_a_reason(layer, reason):
    assert list(Served(KEEP_ALL, **layer).prefill.roles.values()) == [reason]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float16}, "a cache of float16"),
        ({"__class__": type("MHATokenToKVPool", (MHATokenToKVPool,), {"is_quantized_kv_cache": True})}, "a quantized cache"),
        ({"__class__": type("MHATokenToKVPoolFP4", (MHATokenToKVPool,), {})}, "a cache of type MHATokenToKVPoolFP4"),
        ({"use_hnd": True}, "a cache with heads before tokens"),
    ],
)
def test_caches_that_are_not_served_have_a_reason(changes, reason):
    served = Served()
    for name, value in changes.items():
        setattr(served.pool, name, value)
    made = Prefill(served.runner, ServingOptions(KEEP_ALL, "torch_native"))
    assert list(made.roles.values()) == [reason]


def test_a_window_runs_stock_beside_a_soft_cap_that_is_served():
    assert not isinstance(next(iter(Served(KEEP_ALL, logit_cap=30.0).prefill.roles.values())), str)
    stock, ours = Served(sliding_window_size=63), Served(KEEP_ALL, sliding_window_size=63)
    for out, wanted in zip(outputs(ours), outputs(stock), strict=True):
        assert torch.equal(out, wanted)


def test_what_runs_stock_is_told_once(monkeypatch, caplog):
    ours, seen = Served(SPARSE), []
    ours.prefill.counters.log_to(logging.getLogger("flexmask.tests"), 60.0)
    monkeypatch.setattr(TorchNativeAttnBackend, "forward_extend", lambda *arguments, **options: seen.append(options))
    for _ in range(2):
        ours.step([(0, 0, 200)])
    assert seen == []
    monkeypatch.setattr(module, "attend_by_plan", None)
    step = ours.backend.flexmask_step
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, extend_seq_lens_cpu=[200], extend_prefix_lens_cpu=[0])
    for _ in range(2):
        ours.backend.forward_extend(None, 1, 1, ours.model.attn, batch, sinks=torch.ones(4))
    ours.backend.forward_extend(None, None, None, ours.model.attn, batch)
    batch.extend_prefix_lens_cpu = [200]
    ours.backend.forward_extend(None, 1, 1, ours.model.attn, batch)
    assert len(seen) == 4 and step is not None
    monkeypatch.undo()
    for _ in range(2):
        ours.step([(0, 0, 200)], spec_info=object())
    assert caplog.messages == [
        f"flexmask: attention runs stock: {reason}"
        for reason in (
            "layers are called with sinks",
            "layers get no keys and values",
            "layers get another batch than was planned",
            "a batch has spec_info",
        )
    ]
    # the last two steps; of the first only attention was replaced
    assert (ours.prefill.counters.steps, ours.prefill.counters.dense_tokens) == (2, 400)


def test_a_step_that_its_layers_run_stock_counts_as_dense(monkeypatch):
    ours = Served(SPARSE)
    monkeypatch.setattr(TorchNativeAttnBackend, "forward_extend", lambda *arguments, **options: None)
    forward = ours.backend.forward
    monkeypatch.setattr(ours.backend, "forward", lambda *arguments: forward(*arguments, sinks=torch.ones(4)))
    for _ in range(2):
        ours.step([(0, 0, 200), (1, 0, 20)])
    counters = ours.prefill.counters
    assert (counters.steps, counters.sparse_tokens, counters.dense_tokens, counters.density) == (0, 0, 440, None)


@pytest.mark.parametrize(
    ("largest", "reason"), [((512, 20000), "512 rows < 1024"), ((8192, 9000), "9000 tokens < dense_below 16384")]
)
def test_nothing_is_compiled_if_the_largest_call_is_dense(largest, reason, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(prefill_module, "warm_up", lambda *arguments: pytest.fail("compiled"))
    prefill = Served(PrefillSettings(gamma=0.9)).prefill
    prefill.prepare(largest, torch.device("cpu"), torch.float32)
    assert not prefill.sparse_layers
    assert "0 of 1 attention layers prefill sparse" in caplog.text and f"(the largest call: {reason})" in caplog.text


def test_layers_that_the_model_hides_are_told_and_not_served(caplog):
    """SGLang's Transformers backend keeps them in a dict, and changes their scale at every call."""
    caplog.set_level(logging.INFO)
    served = Served()
    served.runner.model = torch.nn.Module()
    served.runner.model.attention_instances = {0: served.model.attn}
    prefill = Prefill(served.runner, ServingOptions(SPARSE, "torch_native"))
    prefill.prepare((512, 512), torch.device("cpu"), torch.float32)
    assert not prefill.sparse_layers
    assert "flexmask runs dense: no attention layers found in this model; torch_native serves it." in caplog.text


def test_dummy_prefills_and_other_layers_of_a_step_are_not_counted_and_free_no_memory():
    ours = Served(SPARSE)
    counters = ours.prefill.counters
    # memory that graphs must not take, until they are captured
    ours.prefill._held = torch.empty(1)
    ours.step([(0, 0, 200)], rids=None)
    assert ours.prefill._held is not None
    assert (counters.sparse_tokens, counters.dense_tokens, counters.density) == (0, 0, None)
    ours.step([(0, 0, 200), (1, 0, 20)])
    assert ours.prefill._held is None
    # as a second layer does
    ours.prefill.count(is_sparse=True)
    ours.step([(0, 200, 1)], ForwardMode.DECODE)
    assert (counters.steps, counters.sparse_tokens, counters.dense_tokens) == (1, 200, 20)
    assert counters.density is not None
    # planned, and then replayed in a graph
    ours.prefill.uncounted = ours.backend.flexmask_step
    ours.backend.init_forward_metadata_out_graph(SimpleNamespace(), in_capture=True)
    assert ours.prefill.uncounted is None


def test_steps_in_cuda_graphs_and_of_decoding_run_stock(monkeypatch):
    ours = Served(SPARSE)
    ours.step([(0, 0, 200)])
    assert ours.backend.flexmask_step is not None
    ours.backend.init_forward_metadata_out_graph(SimpleNamespace(), in_capture=True)
    assert ours.backend.flexmask_step is None
    # nor is a plan used for another kind of step
    ours.step([(0, 0, 200)])
    monkeypatch.setattr(TorchNativeAttnBackend, "forward_extend", lambda *arguments, **options: "stock")
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    assert ours.backend.forward_extend(None, 1, 1, ours.model.attn, batch) == "stock"


@pytest.mark.parametrize("fault", ["another_request", "one_token_off"])
def test_a_planted_fault_is_caught(fault, monkeypatch):
    if fault == "another_request":
        right = step_module.slots_of

        def wrong(table, indices, request, tokens):
            slots = right(table, indices, request, tokens)
            if slots is not None:
                slots[3] = table[(indices[request] + 1) % 8, 3]
            return slots

        monkeypatch.setattr(step_module, "slots_of", wrong)
    else:
        right_plan = step_module.plan_step

        def wrong_plan(starts, lengths, policy):
            chunks = zip(starts, starts[1:], lengths, strict=False)
            return right_plan(starts, [tokens - (tokens > stop - start) for start, stop, tokens in chunks], policy)

        monkeypatch.setattr(step_module, "plan_step", wrong_plan)
    far = [float((out - wanted).abs().max()) for out, wanted in zip(outputs(Served(KEEP_ALL)), outputs(Served()), strict=True)]
    assert far[0] < 1e-4 and max(far) > 0.05
