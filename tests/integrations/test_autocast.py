"""Models of float32 weights under autocast, where query and key arrive in float32 and values in the lower dtype."""

import contextlib
import functools

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.common import KEEP_ALL, SPARSE, make_model
from tests.integrations.families import FAMILIES, SIZES, VOCABULARY

DENSE = {"dense_below": 10**6}


def deepseek():
    """Multi-head latent attention: of query and key only one is rotated."""
    torch.manual_seed(0)
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = {**SIZES, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    del sizes["head_dim"]
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes, **latent, **experts)).eval()


@functools.cache
def model_of(family):
    return deepseek() if family == "DeepseekV3" else FAMILIES[family].make()


FOUND = [name for name, family in FAMILIES.items() if family.available]
FOUND += ["DeepseekV3"] * hasattr(transformers, "DeepseekV3ForCausalLM")
# those with a kernel of their own: a window, sinks
COMPILED = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("Mistral", "GptOss") else name
    for name in FOUND
    if name in ("Llama", "Mistral", "GptOss", "DeepseekV3")
]


def logits_of(model, tokens, dtype=None, settings=None, **options):
    autocast = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    block = contextlib.nullcontext() if settings is None else flexmask_hf.sparse_prefill(model, **settings)
    with autocast, block as run:
        return model(tokens, **options).logits, run


def assert_within_autocast(model, tokens, dtype, settings, **options):
    """The difference from the model's own attention is less than that of autocast itself."""
    exact, _ = logits_of(model, tokens, **options)
    plain, _ = logits_of(model, tokens, dtype, **options)
    found, run = logits_of(model, tokens, dtype, settings, **options)
    assert found.dtype == plain.dtype == dtype
    assert (found - plain).abs().mean() < (plain - exact).abs().mean()
    assert sorted(run.stats) == [0, 1]
    return found, plain


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("family", FOUND)
def test_dense_prompts_are_those_of_the_model(family, use_cache, prompt):
    found, plain = assert_within_autocast(model_of(family), prompt, torch.bfloat16, DENSE, use_cache=use_cache)
    if family == "DeepseekV3" or FAMILIES[family].dense == "sdpa":
        assert torch.equal(found, plain)


@pytest.mark.attention
@pytest.mark.parametrize("family", COMPILED)
def test_prompts_that_keep_every_block_are_those_of_the_model(family, prompt):
    assert_within_autocast(model_of(family), prompt, torch.bfloat16, KEEP_ALL, use_cache=False)


@pytest.mark.parametrize("head_dim", [8, 640])
def test_head_sizes_without_a_mask_are_served(head_dim, prompt):
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "head_dim": head_dim})).eval()
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    with torch.autocast("cpu", torch.bfloat16):
        plain = model.generate(prompt, **options)
        with flexmask_hf.sparse_prefill(model, **KEEP_ALL) as run:
            assert torch.equal(model.generate(prompt, **options), plain)
    assert run.reasons[0] == [f"head_dim {head_dim} outside 16 to 512"]
    for use_cache in (True, False):
        found, plain = assert_within_autocast(model, prompt, torch.float16, KEEP_ALL, use_cache=use_cache)
        assert torch.equal(found, plain)


@pytest.mark.attention
def test_a_compiled_model_follows_autocast(prompt):
    model = model_of("Llama")
    options = {"attention_mask": torch.ones_like(prompt), "use_cache": False}
    torch._dynamo.reset()
    for settings in (DENSE, SPARSE):
        expected, run = logits_of(model, prompt, torch.bfloat16, settings, **options)
        found, again = logits_of(torch.compile(model, backend="eager"), prompt, torch.bfloat16, settings, **options)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)
        assert torch.equal(again.stats[1][0].density, run.stats[1][0].density)
    assert run.stats[1][0].density.max() < 1
    torch._dynamo.reset()


@pytest.mark.attention
def test_prompts_are_inspected_under_autocast(prompt):
    with torch.autocast("cpu", torch.bfloat16):
        assert flexmask_hf.inspect_prefill(make_model(), prompt, **SPARSE).run.stats[0][0].density.max() < 1


@pytest.mark.attention
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
def test_a_model_that_accelerate_prepared_is_served(use_cache, prompt):
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(make_model())
    expected, _ = logits_of(model, prompt, use_cache=use_cache)
    found, run = logits_of(model, prompt, settings=KEEP_ALL, use_cache=use_cache)
    assert found.shape[-1] == VOCABULARY
    assert (found - expected).abs().max() < 0.03
    assert sorted(run.stats) == [0, 1]
