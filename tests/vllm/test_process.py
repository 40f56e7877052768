"""State that the layers of one engine process share, and the steps before the first request."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexmask.integrations.serving import prefill as shared
from flexmask.integrations.serving.layers import SparseLayer
from flexmask.integrations.serving.plan import StepPlan
from flexmask.integrations.vllm import engine as module
from flexmask.integrations.vllm.engine import Engine, engine_of

GIVEN = {"num_heads": 4, "head_size": 32, "scale": 0.2, "num_kv_heads": 2, "kv_cache_dtype": "auto"}


def config_of(options=None, layers=3, **parallel):
    model = SimpleNamespace(hf_config=SimpleNamespace(), dtype=torch.float32, max_model_len=32768, rswa_window=None, model="a")
    model.hf_text_config = SimpleNamespace(num_hidden_layers=layers)
    model.get_total_num_hidden_layers = lambda: layers
    return SimpleNamespace(
        additional_config={"flexmask": options or {}},
        model_config=model,
        parallel_config=SimpleNamespace(**parallel),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=1024),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


@pytest.fixture(autouse=True)
def ranks(monkeypatch):
    found = [0, 1]
    monkeypatch.setattr(module, "_tensor_parallel_rank", lambda: tuple(found))
    return found


@pytest.mark.parametrize(
    ("options", "parallel", "error", "message"),
    [
        ({"gama": 0.9}, {}, ValueError, "got 'gama'"),
        ({"dense_layers": [7]}, {}, ValueError, "dense_layers must hold layer indices below 3"),
        ({}, {"decode_context_parallel_size": 2}, ValueError, "decode_context_parallel_size must be 1 with flexmask"),
        ({}, {"prefill_context_parallel_size": 4}, ValueError, "prefill_context_parallel_size must be 1 .* got 4"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(options, parallel, error, message):
    with pytest.raises(error, match=message):
        Engine(config_of(options, **parallel))


def test_gammas_by_head_are_of_all_ranks_heads(ranks):
    ranks[:] = [1, 2]
    engine = Engine(config_of({"gamma": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]}))
    role = engine.role_of("model.layers.0.attn", "a", GIVEN, {})
    assert isinstance(role, SparseLayer)
    assert role.selector.options["gamma"] == (0.5, 0.6, 0.7, 0.8)
    ranks[:] = [0, 1]
    with pytest.raises(ValueError, match="layer 1: gamma must hold one number for each of query's 4 heads; got 8"):
        engine.role_of("model.layers.1.attn", "a", GIVEN, {})


def test_roles_of_other_layers_are_reasons():
    engine = Engine(config_of({"dense_layers": [1]}))
    assert engine.role_of("model.layers.1.attn", "a", GIVEN, {}) == "in dense_layers"
    assert engine.role_of("draft.layers.3.attn", "a", GIVEN, {}) == "a draft model's"
    assert engine.role_of("draft.layers.2.attn", "b", GIVEN, {}) == "a draft model's"
    windowed = config_of()
    windowed.model_config.rswa_window = 128
    assert engine_of(windowed).role_of("model.layers.0.attn", "a", GIVEN, {}) == "a window that leaves the prompt visible"


def test_one_engine_for_a_configuration():
    config, other = config_of(), config_of()
    first = engine_of(config)
    assert engine_of(config) is first
    # as a draft model has it: another model, the same registry of layers
    draft = config_of()
    draft.compilation_config = config.compilation_config
    assert engine_of(draft) is first
    assert engine_of(other) is not first


class OwnBuilder:
    """As the plug-in makes it: the class, and not one derived from it, has itself as `flexmask_own`."""

    flexmask_own: Any = None


OwnBuilder.flexmask_own = OwnBuilder


def engine_with_layers(monkeypatch, options, first_stage=True, builders=(OwnBuilder,) * 3, is_latent=False):
    """Three layers, the first dense; and what happens before the first request."""
    config, done = config_of({"dense_layers": [0], **options}), []
    engine = Engine(config)
    monkeypatch.setattr(shared, "warm_up", lambda layers, *rest: done.append(("warm up", len(layers), *rest)) or 0.0)
    monkeypatch.setattr(shared, "reserve", lambda layers, size, *rest: done.append(("reserve", len(layers), size)))
    monkeypatch.setattr(shared, "roles_line", lambda roles, options, *rest: done.append(("roles", len(roles), *rest)))
    monkeypatch.setattr(module, "Finalize", lambda *arguments, **options: done.append(("at exit", arguments[1])))
    monkeypatch.setattr(engine.counters, "log_to", lambda log, seconds: done.append(("log", seconds)))
    monkeypatch.setattr(engine.counters, "export", lambda: done.append(("export",)))
    monkeypatch.setattr(module, "is_first_stage", lambda: first_stage)
    for number, builder in enumerate(builders):
        name = f"model.layers.{number}.attn"
        impl = SimpleNamespace(flexmask_kernel="STOCK", flexmask_role=lambda name: engine.role_of(name, "a", GIVEN, {}))
        backend = SimpleNamespace(is_mla=lambda: is_latent, get_builder_cls=lambda builder=builder: builder)
        config.compilation_config.static_forward_context[name] = SimpleNamespace(impl=impl, attn_backend=backend)
    config.compilation_config.static_forward_context["another"] = SimpleNamespace()
    return engine, done


def test_everything_before_the_first_request_happens_once(monkeypatch):
    engine, done = engine_with_layers(monkeypatch, {"log_every": 7})
    for in_profile in (True, False, True):
        engine.prepare(torch.device("cpu"), in_profile)
    assert [each[0] for each in done] == ["roles", "warm up", "log", "export", "at exit"]
    assert (done[2], done[4]) == (("log", 7), ("at exit", engine.counters.log))
    assert done[1][2] == (1024, 32768)  # the largest call
    assert done[0] == ("roles", 3, "STOCK", 1024)
    assert done[1][1] == 2
    assert counting_layer(engine) == "model.layers.1.attn"


def test_layers_whose_builder_vllm_derived_are_dense(monkeypatch):
    """As those with chunked local attention (Llama 4); the first layer that plans counts."""
    derived = type("Derived", (OwnBuilder,), {})
    engine, done = engine_with_layers(monkeypatch, {"dense_layers": []}, builders=(derived, OwnBuilder, derived))
    engine.prepare(torch.device("cpu"), False)
    dense = {name: role for name, role in engine.roles.items() if isinstance(role, str)}
    assert dense == {f"model.layers.{each}.attn": "its backend shows layers other requests" for each in (0, 2)}
    assert done[1][:2] == ("warm up", 1)
    assert counting_layer(engine) == "model.layers.1.attn"


def counting_layer(engine):
    """The layer that counts a step of a token; None if none does."""
    found = []
    for name, role in engine.roles.items():
        if isinstance(role, SparseLayer):
            engine.count(role, StepPlan((), (), 0, 1), is_sparse=False)
            found += [name] * engine.counters.dense_tokens
            engine.counters.reset()
    assert len(found) <= 1
    return found[0] if found else None


def latent_builder(decoded, support):
    """A builder's class as vLLM has them; it may decode the rows that verify guesses."""

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
def test_chunks_that_latent_attention_decodes_are_told_as_dense(decoded, support, guessed, least, monkeypatch):
    engine, done = engine_with_layers(
        monkeypatch, {"least_rows": 1}, builders=[latent_builder(decoded, support)] * 3, is_latent=True
    )
    engine._vllm_config.guessed = guessed
    engine.prepare(torch.device("cpu"), False)
    assert done[0] == ("roles", 3, "STOCK", least)


@pytest.mark.parametrize("in_profile", [True, False])
def test_the_largest_call_is_made_while_memory_is_measured(monkeypatch, in_profile):
    engine, done = engine_with_layers(monkeypatch, {})
    engine.prepare(torch.device("cuda"), in_profile)
    # the last 1,024 rows of 32,768 tokens
    assert [each[2] for each in done if each[0] == "reserve"] == ([(1024, 32768)] if in_profile else [])


def test_one_stage_exports_the_counters(monkeypatch):
    """Metrics of processes are added up."""
    engine, done = engine_with_layers(monkeypatch, {}, first_stage=False)
    engine.prepare(torch.device("cpu"), False)
    assert [each[0] for each in done] == ["roles", "warm up", "log", "at exit"]


def test_one_rank_logs(monkeypatch, ranks):
    ranks[:] = [1, 2]
    engine, done = engine_with_layers(monkeypatch, {})
    engine.prepare(torch.device("cpu"), True)
    assert [each[0] for each in done] == ["warm up"]
