"""Layers and caches that SGLang serves stock, with their reasons; what the plug-in logs and counts."""

import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from flexmask.integrations.serving.layers import SparseLayer, Stock
from flexmask.integrations.serving.options import ServingOptions

pytest.importorskip("sglang", reason="`make test-sglang` has it in an environment of its own")

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from flexmask.integrations.sglang.engine import SGLangEngine
from tests.sglang.served import KEEP_ALL, SPARSE, Served, ServedMixture, outputs

pytestmark = pytest.mark.usefixtures("no_grad")


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
    assert list(Served(KEEP_ALL, **layer).engine.roles.values()) == [Stock(reason)]


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
    # of a mixture, the attention's pool decides
    mixture = ServedMixture()
    for each, pool in ((served, served.pool), (mixture, mixture.pool.full_kv_pool)):
        for name, value in changes.items():
            setattr(pool, name, value)
        made = SGLangEngine(each.runner, ServingOptions(KEEP_ALL, "torch_native"))
        assert list(made.roles.values()) == [Stock(reason)]


def test_a_window_runs_stock_beside_a_soft_cap_that_is_served():
    assert isinstance(next(iter(Served(KEEP_ALL, logit_cap=30.0).engine.roles.values())), SparseLayer)
    stock, ours = Served(sliding_window_size=63), Served(KEEP_ALL, sliding_window_size=63)
    torch.testing.assert_close(outputs(ours), outputs(stock), rtol=0, atol=0)


def test_what_runs_stock_is_logged_once(caplog, monkeypatch):
    stock = Mock()
    monkeypatch.setattr(TorchNativeAttnBackend, "forward_extend", stock)
    ours = Served(SPARSE)
    ours.engine.counters.log_to(logging.getLogger("flexmask.tests"), 60.0)
    for _ in range(2):
        ours.step([(0, 0, 200)])
    assert stock.call_count == 0
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, extend_seq_lens_cpu=[200], extend_prefix_lens_cpu=[0])
    for _ in range(2):
        ours.backend.forward_extend(None, 1, 1, ours.model.attn, batch, sinks=torch.ones(4))
    ours.backend.forward_extend(None, None, None, ours.model.attn, batch)
    batch.extend_prefix_lens_cpu = [200]
    ours.backend.forward_extend(None, 1, 1, ours.model.attn, batch)
    assert stock.call_count == 4
    for _ in range(2):
        ours.step([(0, 0, 200)], spec_info=object())
    assert [each for each in caplog.messages if "compiling" not in each and "flexmask" in each] == [
        f"flexmask: the engine's own attention runs: {reason}"
        for reason in (
            "layers are called with sinks",
            "layers get no keys and values",
            "layers get another batch than was split",
            "a batch has spec_info",
        )
    ]
    # four calls of one step that was split, and the last two steps
    assert (ours.engine.counters.sparse_steps, ours.engine.counters.dense_tokens) == (2, 4 * 200 + 400)


def test_layers_that_the_model_hides_are_logged_and_not_served(caplog):
    """SGLang's Transformers backend keeps them in a dict, and changes their scale at every call."""
    caplog.set_level(logging.INFO)
    served = Served()
    served.runner.model = torch.nn.Module()
    served.runner.model.attention_instances = {0: served.model.attn}
    engine = SGLangEngine(served.runner, ServingOptions(SPARSE, "torch_native"))
    engine.prepare((512, 512), torch.device("cpu"), torch.float32)
    assert not engine.sparse_layers
    assert "flexmask: no attention layers found in this model; torch_native runs it." in caplog.text


def test_dummy_prefills_and_other_layers_of_a_step_are_not_counted_and_free_no_memory():
    ours = Served(SPARSE)
    counters = ours.engine.counters
    # memory that graphs must not take, until they are captured
    ours.engine._reserved = torch.empty(1)
    ours.step([(0, 0, 200)], rids=None)
    assert ours.engine._reserved is not None
    assert (counters.sparse_tokens, counters.dense_tokens, counters.density) == (0, 0, None)
    ours.step([(0, 0, 200), (1, 0, 20)])
    assert ours.engine._reserved is None
    ours.step([(0, 200, 1)], ForwardMode.DECODE)
    assert (counters.sparse_steps, counters.sparse_tokens, counters.dense_tokens) == (1, 200, 20)
    assert counters.density is not None
