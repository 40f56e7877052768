"""A compiled model in the block: one compilation per shape."""

import contextlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig, LlamaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.common import make_model, static_cache

pytestmark = pytest.mark.attention

OPTIONS = {"gamma": 0.5, "block_size": 32, "min_budget": 0, "dense_below": 0}
LENGTH = 130


@pytest.fixture
def counted():
    torch._dynamo.reset()
    yield CompileCounterWithBackend("eager")
    torch._dynamo.reset()


@pytest.fixture
def prompt(tokens):
    return tokens[:1, :LENGTH]


def test_prompts_of_one_shape_are_compiled_once(model, prompt, counted):
    arguments = {"attention_mask": torch.ones_like(prompt), "use_cache": False}
    expected = []
    for gamma in (0.5, 0.2):
        with flexmask_hf.sparse_prefill(model, **{**OPTIONS, "gamma": gamma}) as run:
            expected.append((model(prompt, **arguments).logits, run.stats[1][0].density))
    model = torch.compile(model, backend=counted, fullgraph=True)
    assert not torch.equal(expected[0][1], expected[1][1])
    for collect_stats in (True, False):
        # a second block, and one with other options
        for gamma, (logits, density) in zip((0.5, 0.2), expected, strict=True):
            with flexmask_hf.sparse_prefill(model, **{**OPTIONS, "gamma": gamma}, collect_stats=collect_stats) as run:
                for _ in range(2):
                    assert (model(prompt, **arguments).logits - logits).abs().max() < 1e-4
            assert [len(each) for each in run.stats.values()] == [2, 2] * collect_stats
            assert all(torch.equal(stats.density, density) for stats in run.stats.get(1, []))
    assert counted.frame_count == 1


@pytest.mark.parametrize("static", [False, True], ids=["DynamicCache", "StaticCache"])
def test_decoding_is_compiled_as_often_as_without_a_block(prompt, counted, static):
    def compilations(in_block):
        torch._dynamo.reset()
        counted.clear()
        model = make_model()
        options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        options["cache_implementation"] = "static" if static else None
        model.compile(backend=counted)
        found = []
        for _ in range(2):
            with flexmask_hf.sparse_prefill(model, **OPTIONS) if in_block else contextlib.nullcontext() as run:
                found.append(model.generate(prompt, **options))
            assert not in_block or [len(each) for each in run.stats.values()] == [1, 1]
        assert all(torch.equal(each, found[0]) for each in found)
        return counted.frame_count

    assert compilations(True) == compilations(False)


def test_model_by_name_is_compiled_with_its_config(model, prompt, counted):
    flexmask_hf.configure(model, **OPTIONS)
    model.set_attn_implementation("flexmask")
    expected = model(prompt, past_key_values=static_cache(model, LENGTH + 8)).logits
    step = torch.compile(model, backend=counted, fullgraph=True)
    for _ in range(2):
        assert (step(prompt, past_key_values=static_cache(model, LENGTH + 8)).logits - expected).abs().max() < 1e-4
    # later options need no compilation
    before = counted.frame_count
    flexmask_hf.configure(model, **{**OPTIONS, "gamma": 0.2})
    changed = step(prompt, past_key_values=static_cache(model, LENGTH + 8)).logits
    assert (changed - expected).abs().max() > 1e-3
    assert counted.frame_count == before


def test_export_is_refused(model, prompt):
    given = {"attention_mask": torch.ones_like(prompt), "use_cache": False}
    with flexmask_hf.sparse_prefill(model, **OPTIONS), pytest.raises(Exception, match=r"flexmask does not support torch\.export"):
        torch.export.export(model, (prompt,), given, strict=True)


@pytest.mark.parametrize("head_dim", [8, 32], ids=["no mask", "a mask"])
def test_dense_layers_of_a_compiled_model_have_gradients(prompt, counted, head_dim):
    sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
    prompt = prompt % 128

    def gradient(run):
        model.zero_grad()
        with torch.enable_grad(), flexmask_hf.sparse_prefill(model, **{**OPTIONS, "dense_below": 1000}):
            run(prompt, use_cache=False).logits.square().mean().backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    expected = gradient(model)
    assert expected.abs().max() > 0
    torch.testing.assert_close(gradient(torch.compile(model, backend=counted)), expected)
