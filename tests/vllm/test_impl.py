"""The implementation around a written-out stock backend: every row's own keys, pages, scales, memory."""

import weakref
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")

from flexmask.integrations.serving.options import ServingOptions
from flexmask.settings import PrefillSettings
from tests.expected import rows_attention
from tests.vllm import stock_steps
from tests.vllm.stock_steps import DIM, HEADS, KV_HEADS, LAYER, MIXES, assert_stock_outputs, rows_of, step_of


@pytest.mark.attention
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
@pytest.mark.parametrize("mix", MIXES)
def test_every_row_attends_to_its_own_keys(mix, order, by_kernel, parts, engine, monkeypatch):
    calls = stock_steps.read_by_kernel(monkeypatch) if by_kernel else Mock()
    assert_stock_outputs(parts, *step_of(MIXES[mix], order))
    sparse = [(rows, cached) for rows, cached in MIXES[mix] if rows >= 32]
    assert (engine.counters.sparse_tokens, engine.counters.sparse_steps) == (sum(rows for rows, _ in sparse), bool(sparse))
    # whole prompts have no page
    assert calls.call_count == by_kernel * sum(cached > 0 for _, cached in sparse)
    # parts get no ahead-of-time schedule
    assert all(each.is_fast for each in parts[1].calls[:-1] if sparse)


@pytest.mark.attention
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("junk", [float("nan"), -50.0])
def test_pages_before_the_window_are_not_read(junk, by_kernel, parts, engine, monkeypatch):
    """The pages are free: they are empty, or hold another request's keys."""
    if by_kernel:
        stock_steps.read_by_kernel(monkeypatch)
    builder, _ = parts
    engine.options = ServingOptions(PrefillSettings(gamma=0.2, min_budget=32, block_size=32, dense_below=0))
    engine.attend = Mock(wraps=engine.attend)
    impl = stock_steps.impl_of(engine, sliding_window=150)
    common, (query, key, value, cache) = step_of([(96, 230), (64, 40)])
    metadata, outputs = builder.build(0, common), []
    with torch.inference_mode():
        for _ in range(2):
            outputs.append(impl.forward(LAYER, query, key, value, cache, metadata, torch.empty_like(query)))
            # the first row sees 81 and later: 5 pages are free
            cache[common.block_table_tensor[0, :5].long()] = junk
    assert engine.counters.density is not None and engine.counters.density < 0.9
    assert torch.equal(*outputs)
    # masks are computed from the same keys
    keys = [call.args[3] for call in engine.attend.call_args_list]
    assert [each.shape[1] for each in keys] == [326, 104] * 2 and all(map(torch.equal, keys[:2], keys[2:]))


@pytest.mark.attention
def test_an_fp8_cache_and_quantized_queries_are_scaled(parts, engine):
    """As FLASH_ATTN's kernels get them, with scales by KV head."""
    builder, impl = parts[0], stock_steps.impl_of(engine, kv_cache_dtype="fp8")
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
    # keys and values are rounded before the chunk, and exact in it
    both = zip(rows_of(numbers, common.block_table_tensor[0], 33), (key[:70], value[:70]), strict=True)
    later = rows_attention(exact[:70], *(torch.cat(each) for each in both), 0.2)
    torch.testing.assert_close(output[:70], later, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output[70:], rows_attention(exact[70:], key[70:], value[70:], 0.2), rtol=1e-4, atol=1e-5)
    # all rows from the cache, rounded or not, would give other outputs
    for read in (numbers, cache):
        assert (later - rows_attention(exact[:70], *rows_of(read, common.block_table_tensor[0], 103), 0.2)).abs().max() > 1e-2


@pytest.mark.parametrize("by_kernel", [False, True])
def test_the_keys_of_one_request_are_gone_before_those_of_the_next(by_kernel, parts, monkeypatch):
    builder, impl = parts
    common, tensors = step_of([(90, 17), (70, 33)])
    made, alive, gather = [], [], impl.flexmask_gather

    def note(found=()):
        alive.append(sum(each() is not None for each in made))
        made.extend(map(weakref.ref, found))

    def watched(*given):
        note()
        found = gather(*given)
        made.extend(map(weakref.ref, found))
        return found

    def attended(role, request, query, key, value, sinks, out):
        note((key, value))
        return out.zero_()

    if by_kernel:
        stock_steps.read_by_kernel(monkeypatch).side_effect = lambda *_: note() or DEFAULT
    else:
        monkeypatch.setattr(impl, "flexmask_gather", watched)
    monkeypatch.setattr(impl.flexmask.engine, "attend", attended)
    with torch.inference_mode():
        impl.forward(LAYER, *tensors, builder.build(0, common), torch.empty_like(tensors[0]))
    assert alive == [0] * 4


def test_memory_is_measured_before_the_first_step(parts, engine):
    _, impl = parts
    engine.prepare.reset_mock()
    output = torch.zeros(3, HEADS, DIM)
    with pytest.raises(AttributeError, match="starts"):  # the stock backend here has no such run of its own
        impl.forward(LAYER, output, output, output, torch.empty(0), None, output)
    engine.prepare.assert_called_once_with(output.device, in_profile=True)
