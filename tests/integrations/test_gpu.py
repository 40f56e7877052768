"""The adapter on GPUs: every family, decoding that transformers compiles, models over two devices."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.flex.backend import flash_available
from tests.integrations import common
from tests.integrations.families import FAMILIES, SIZES, VOCABULARY
from tests.integrations.support import written_out

pytestmark = pytest.mark.gpu
KEEP_ALL: dict[str, Any] = {**common.KEEP_ALL, "block_size": 64}
SPARSE: dict[str, Any] = {**KEEP_ALL, "gamma": 0.4, "tau": 0.13}
TOLERANCE = 1e-3  # of logits below 1, in float32


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_dense_attention(cuda, tokens, family):
    model = FAMILIES[family].make().to(cuda)
    mask = common.padded(tokens)
    inputs = {"input_ids": tokens.to(cuda), "attention_mask": mask.to(cuda)}
    real = mask.to(cuda) != 0
    dense = model(**inputs).logits
    with flexmask_hf.sparse_prefill(model, **KEEP_ALL):
        assert (model(**inputs).logits - dense)[real].abs().max() < TOLERANCE
    with flexmask_hf.sparse_prefill(model, **SPARSE, collect_masks=True) as run:
        sparse = model(**inputs).logits
    assert run.stats[1][0].density.mean() < 0.9
    assert (sparse - dense)[real].abs().max() > 10 * TOLERANCE
    with written_out(model, run.masks):
        assert (sparse - model(**inputs).logits)[real].abs().max() < TOLERANCE


# torch's own first graph is empty
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_static_cache_generates_as_a_dynamic_one(cuda, tokens, family):
    """Transformers compiles the decoding steps over a static cache by itself."""
    model = FAMILIES[family].make().to(cuda)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(tokens).to(cuda)
    expected = model.generate(tokens.to(cuda), **options)
    with flexmask_hf.sparse_prefill(model, **KEEP_ALL) as run:
        got = model.generate(tokens.to(cuda), cache_implementation="static", **options)
    assert torch.equal(got, expected)
    assert not run.stats[1][0].dense


def test_compiled_forward_prefills_as_an_eager_one(cuda, tokens):
    model = FAMILIES["Llama"].make().to(cuda)
    tokens = tokens[:1].to(cuda)
    with flexmask_hf.sparse_prefill(model, **SPARSE) as run:
        expected = model(tokens, use_cache=False).logits
    assert run.stats[1][0].density.mean() < 0.9
    compiled, mask = torch.compile(model), torch.ones_like(tokens)
    with flexmask_hf.sparse_prefill(model, **SPARSE) as again:
        assert (compiled(tokens, attention_mask=mask, use_cache=False).logits - expected).abs().max() < TOLERANCE
    assert torch.equal(again.stats[1][0].density, run.stats[1][0].density)


# torch's compiler reads .grad
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "options",
    [{"method": "causal", "block_size": 64, "dense_below": 0}, {**KEEP_ALL, "dense_layers": (0, 1)}],
    ids=["method", "dense layers"],
)
def test_gradients_of_other_masks(cuda, tokens, options):
    model = FAMILIES["Mistral"].make().to(cuda)
    weight = model.get_input_embeddings().weight
    gradients = []
    for sparse in (False, True):
        with torch.enable_grad(), flexmask_hf.sparse_prefill(model, **options) if sparse else nullcontext():
            loss = model(tokens.to(cuda), labels=tokens.to(cuda)).loss
            gradients.append(torch.autograd.grad(loss, weight)[0])
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-3)


@pytest.mark.skipif(
    not flash_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs flash-attn-4 and a Hopper GPU"
)
@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_soft_caps_and_sinks_run_on_flash(cuda, family):
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family].options, "head_dim": 64})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(cuda, torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 100
    model.set_attn_implementation(FAMILIES[family].dense)
    ids = torch.randint(1, VOCABULARY, (1, 1500), generator=torch.Generator().manual_seed(1)).to(cuda)
    options = {**common.KEEP_ALL, "block_size": 128, "gamma": 0.4, "tau": 0.13}
    logits = {}
    for backend in ("triton", "flash"):
        with flexmask_hf.sparse_prefill(model, **options, backend=backend) as run:
            logits[backend] = model(ids).logits
        assert run.stats[1][0].density.mean() < 0.95
    dense = model(ids).logits
    apart = (logits["triton"] - dense).abs().mean()
    assert (logits["flash"] - logits["triton"]).abs().mean() < 0.2 * apart


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_model_over_two_gpus(tokens, tmp_path):
    from transformers import AutoModelForCausalLM

    model = FAMILIES["Llama"].make()
    mask = common.padded(tokens)
    expected = model(tokens, attention_mask=mask).logits
    model.save_pretrained(tmp_path)
    layers = {f"model.layers.{layer}": layer for layer in (0, 1)}
    parts = {"model.embed_tokens": 0, "model.rotary_emb": 0, **layers, "model.norm": 1, "lm_head": 1}
    spread = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=parts).eval()
    with flexmask_hf.sparse_prefill(spread, **KEEP_ALL) as run:
        logits = spread(tokens.to("cuda:0"), attention_mask=mask.to("cuda:0")).logits.cpu()
    assert (logits - expected)[mask != 0].abs().max() < 1e-3
    assert {run.stats[layer][0].density.device.index for layer in (0, 1)} == {0, 1}
