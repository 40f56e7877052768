"""State that the layers of one engine process share, and the steps before the first request."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

from flexmask.integrations.serving.layers import Stock
from flexmask.integrations.vllm.engine import VLLMEngine, engine_of
from tests.vllm.configs import config_of

GIVEN = {"num_heads": 4, "head_size": 32, "scale": 0.2, "num_kv_heads": 2, "kv_cache_dtype": "auto"}


@pytest.fixture(autouse=True)
def place(monkeypatch):
    """Place of this process among vLLM's."""
    place = SimpleNamespace(rank=0, ranks=1, is_first_stage=True)
    distributed = SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: place.rank,
        get_tensor_model_parallel_world_size=lambda: place.ranks,
        get_pp_group=lambda: SimpleNamespace(is_first_rank=place.is_first_stage),
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    return place


@pytest.mark.parametrize(
    ("options", "server", "message"),
    [
        ({"dense_layers": [7]}, {}, "dense_layers must hold layer indices below 3"),
        ({}, {"decode_context_parallel_size": 2}, "decode_context_parallel_size must be 1 with flexmask"),
        ({}, {"prefill_context_parallel_size": 4}, "prefill_context_parallel_size must be 1 .* got 4"),
        ({}, {"enable_sleep_mode": True}, "--enable-sleep-mode must be off with flexmask, which has not been tested with it"),
        ({}, {"use_ubatching": True}, "--enable-dbo .* must be off with flexmask"),
        ({}, {"original_max_model_len": -1}, "--max-model-len must be a number with flexmask"),
        ({}, {"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND must be off with flexmask"),
        ({}, {"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT must be off with flexmask"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(options, server, message, monkeypatch):
    for name, value in server.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=message):
        VLLMEngine(config_of(options, **server))


def test_one_engine_for_a_configuration():
    config, other = config_of(), config_of()
    first = engine_of(config)
    assert engine_of(config) is first
    # as a draft model has it: another model, the same registry of layers
    draft = config_of()
    draft.compilation_config = config.compilation_config
    assert engine_of(draft) is first
    assert engine_of(other) is not first


def builder_class(decoded=1, support="SINGLE_ONLY"):
    """A builder's class as the plug-in makes it; for latent attention it may decode the rows that verify guesses."""

    class Builder:
        reorder_batch_threshold = decoded
        query_len_support = SimpleNamespace(name=support)

        def __init__(self, *arguments):
            raise AssertionError("no builder is made before the roles are logged")

        def _init_reorder_batch_threshold(self, reorder_batch_threshold, supports_spec_as_decode):
            guessed = self.vllm_config.guessed if supports_spec_as_decode else 0
            self.reorder_batch_threshold = max(reorder_batch_threshold, 1 + guessed)

    Builder.flexmask_own = Builder
    return Builder


def layer_of(builder=None, model="a", is_latent=False, kind=SimpleNamespace):
    """One of vLLM's layers, with its part of the plug-in."""
    made = kind()
    made.impl = SimpleNamespace(flexmask_kernel="STOCK", flexmask=SimpleNamespace(model=model, impl_args=GIVEN, role=None))
    builder = builder or builder_class()
    made.attn_backend = SimpleNamespace(is_mla=lambda: is_latent, get_builder_cls=lambda: builder)
    return made


def engine_with(*layers, **options):
    """An engine of these layers, by default with the first one dense; mocks note what it starts with, and compile nothing."""
    config = config_of({"dense_layers": [0], **options})
    engine = VLLMEngine(config)
    engine.start, engine.reserve, engine.compile_reader = Mock(), Mock(), Mock()
    engine.calling_layers = lambda: (SimpleNamespace,)
    engine.layers.update({f"model.layers.{number}.attn": layer for number, layer in enumerate(layers)})
    engine.layers["another"] = SimpleNamespace()
    return engine


def started(engine):
    """Largest call, dtype, kernel, least rows of a chunk, and whether this rank logs and its stage exports the counters."""
    largest, _, dtype, kernel, policy, is_first, exports = engine.start.call_args.args
    return largest, dtype, kernel, policy.min_rows, is_first, exports


@pytest.mark.parametrize(("device", "in_profile"), [("cpu", True), ("cuda", False), ("cuda", True)])
def test_everything_before_the_first_request_happens_once(device, in_profile):
    engine = engine_with(layer_of(), layer_of(), layer_of())
    for again in (in_profile, False, True):
        engine.prepare(torch.device(device), again)
    # the last 1,024 rows of 32,768 tokens, which are measured on a GPU while vLLM measures memory
    engine.start.assert_called_once()
    assert started(engine) == ((1024, 32768), torch.float32, "STOCK", 1024, True, True)
    is_measured = (device, in_profile) == ("cuda", True)
    assert engine.reserve.mock_calls == [call((1024, 32768), torch.device(device), torch.float32)] * is_measured
    assert engine.compile_reader.mock_calls == [call(torch.device(device))] * (device == "cuda")
    assert len(engine.sparse_layers) == 2


@pytest.mark.parametrize("is_latent", [False, True])
def test_the_reader_of_the_cache_is_compiled_for_sparse_layers_with_keys_in_it(is_latent, monkeypatch):
    made = Mock()
    monkeypatch.setattr("flexmask.integrations.vllm.engine.pages_kernel.compile_for", made)
    engine = engine_with(*(layer_of(is_latent=is_latent) for _ in range(3)))
    engine.prepare(torch.device("cpu"), False)
    VLLMEngine.compile_reader(engine, torch.device("cpu"))
    made.assert_called_once_with([] if is_latent else [GIVEN["head_size"]] * 2, torch.float32, torch.device("cpu"))


def test_layers_that_are_not_served_are_stock_with_a_reason():
    """Such as layers with chunked local attention (Llama 4), those of Kimi Linear, and those of drafts."""
    own = builder_class()
    rewrites, latent = layer_of(type("Derived", (own,), {})), layer_of(kind=type("LatentAttention", (), {}))
    stock = {
        "model.layers.0.attn": (layer_of(), "in dense_layers"),
        "model.layers.1.attn": (rewrites, "its builder rewrites the batch (chunked local attention)"),
        "model.layers.1.latent": (latent, "a layer of type LatentAttention, which calls the engine's kernels itself"),
        "draft.layers.3.attn": (layer_of(), "a draft model's"),
        "draft.layers.2.attn": (layer_of(model="b"), "a draft model's"),
        "model.attn": (layer_of(), "no layer number in its name"),
    }
    engine = engine_with()
    engine.layers.update({name: layer for name, (layer, _) in stock.items()})
    engine.layers["model.layers.2.attn"] = layer_of(own)
    engine.prepare(torch.device("cpu"), False)
    (served,) = engine.sparse_layers
    assert engine.roles == {**{name: Stock(reason) for name, (_, reason) in stock.items()}, "model.layers.2.attn": served}
    assert all(engine.layers[name].impl.flexmask.role is role for name, role in engine.roles.items())
    windowed = engine_with(layer_of(), layer_of())
    windowed._vllm_config.model_config.rswa_window = 128
    windowed.prepare(torch.device("cpu"), False)
    assert set(windowed.roles.values()) == {Stock("a window that leaves the prompt visible")}


@pytest.mark.parametrize(
    ("decoded", "support", "guessed", "least"),
    [
        (512, "VARLEN", 0, 513),
        (1, "SINGLE_ONLY", 0, 128),
        (1, "UNIFORM", 200, 202),
        (512, "VARLEN", 600, 602),
        (1, "SINGLE_ONLY", 200, 128),
    ],
)
def test_chunks_that_latent_attention_decodes_are_told_as_dense(decoded, support, guessed, least):
    engine = engine_with(layer_of(), layer_of(builder_class(decoded, support), is_latent=True), min_rows=1)
    engine._vllm_config.guessed = guessed
    engine.prepare(torch.device("cpu"), False)
    assert started(engine)[-3] == least


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"is_first_stage": False}, (True, False)), ({"rank": 1, "ranks": 2}, (False, True))],
    ids=["stage", "rank"],
)
def test_one_stage_exports_the_counters_and_one_rank_logs(place, changes, expected):
    """Metrics of processes are added up."""
    vars(place).update(changes)
    engine = engine_with(layer_of(), layer_of(), layer_of())
    engine.prepare(torch.device("cpu"), False)
    assert started(engine)[-2:] == expected
