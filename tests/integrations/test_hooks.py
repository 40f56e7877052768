"""Models loaded with "flex_attention", which the adapter hooks one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask

pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.hooks import _HOOKED
from flexmask.integrations.run import HOOKS, RUNS
from flexmask.integrations.settings import PrefillSettings
from tests.integrations.cells import RELEASE, dynamic_cache
from tests.integrations.common import BATCH, KEEP_ALL, LENGTH, MARKS, SPARSE, make_model, padded

pytestmark = MARKS


@pytest.mark.usefixtures("eager_block_masks")
@pytest.mark.parametrize("family", ["Llama", pytest.param("Mistral", marks=pytest.mark.slow)])
def test_hooked_model_selects_and_others_do_not(tokens, family):
    model, other = (make_model(family, attn_implementation=name) for name in ("sdpa", "flex_attention"))
    stock_runs = RELEASE >= (4, 57)  # before, it asks for a log-sum-exp, which CPUs have not
    mask = padded(tokens)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    expected, generated = model(tokens).logits, model.generate(tokens, **options)
    model.set_attn_implementation("flex_attention")
    before = other(tokens).logits if stock_runs else None
    run = flexmask_hf.hook_flex_attention(model, **KEEP_ALL)
    try:
        assert model.config._attn_implementation == "flex_attention"
        assert (model(tokens).logits - expected).abs().max() < 1e-4
        assert torch.equal(model.generate(tokens, **options), generated)
        # transformers' own path cannot: its mask has no contiguous()
        assert torch.equal(model.generate(tokens, cache_implementation="static", **options), generated)
        assert [len(run.stats[layer]) for layer in (0, 1)] == [3, 3]
        run.settings = PrefillSettings.from_options(**SPARSE)
        assert (model(tokens).logits - expected).abs().max() > 1e-2
        assert not stock_runs or torch.equal(other(tokens).logits, before)
        assert len(run.stats[0]) == 4
    finally:
        flexmask_hf.unhook_flex_attention(model)
    if stock_runs:
        assert (model(tokens).logits - expected).abs().max() < 1e-4
    assert len(run.stats[0]) == 4


def test_hooked_model_keeps_its_window(tokens):
    model = make_model("Mistral", attn_implementation="sdpa")
    expected = model(tokens).logits
    model.set_attn_implementation("flex_attention")
    run = flexmask_hf.hook_flex_attention(model, **KEEP_ALL)
    try:
        assert (model(tokens).logits - expected).abs().max() < 1e-4
        assert [calls[0].dense for calls in run.stats.values()] == [False, False]
    finally:
        flexmask_hf.unhook_flex_attention(model)


def test_hooked_model_keeps_the_mask_of_hugging_face(tokens):
    model = make_model("Llama", attn_implementation="flex_attention")
    flexmask_hf.hook_flex_attention(model, **KEEP_ALL)
    seen = []
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    model(tokens, attention_mask=padded(tokens))
    handle.remove()
    flexmask_hf.unhook_flex_attention(model)
    rows = torch.arange(LENGTH)
    visible = (rows[:, None] >= rows) & (padded(tokens)[:, None, None] != 0)
    assert torch.equal(create_mask(seen[0].mask_mod, BATCH, 1, LENGTH, LENGTH, device="cpu"), visible)
    assert seen[0].kv_num_blocks.shape[:2] == (BATCH, 1)


@pytest.fixture
def former():
    """Record the calls of the former functions behind "flex_attention", which CPUs cannot run under these masks."""
    attention, mask = AttentionInterface()["flex_attention"], AttentionMaskInterface()["flex_attention"]
    seen = []

    def recording(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return torch.zeros_like(query).transpose(1, 2).contiguous(), None

    AttentionInterface.register("flex_attention", recording)
    yield seen
    AttentionInterface.register("flex_attention", attention)
    AttentionMaskInterface.register("flex_attention", mask)


@pytest.mark.usefixtures("eager_block_masks")
def test_model_that_shares_its_config_with_a_hooked_one_runs_as_before(tokens, former):
    model = make_model(attn_implementation="flex_attention")
    other = LlamaForCausalLM(model.config).eval()
    mask = padded(tokens)
    flexmask_hf.hook_flex_attention(model, **KEEP_ALL)
    cache = dynamic_cache(model)
    other(tokens, attention_mask=mask, past_key_values=cache)
    assert former[0].kv_num_blocks.shape[:2] == (BATCH, 1)
    other(tokens[:, :1], attention_mask=F.pad(mask, (0, 1), value=1), past_key_values=cache)
    assert torch.equal(former[2][:, 0, 0] == 0, F.pad(mask, (0, 1), value=1) != 0)
    assert former[2].min() == -torch.inf  # added to the scores
    # packed sequences, which a hooked model refuses
    other(tokens, position_ids=torch.arange(LENGTH)[None] % 265, use_cache=False)
    assert not create_mask(former[4].mask_mod, BATCH, 1, LENGTH, LENGTH, device="cpu")[0, 0, 265:, :265].any()
    assert len(former) == 6


def test_unhooking_ends_one_hook_and_nothing_else(model, tokens):
    model.config._attn_implementation = "flex_attention"
    other = LlamaForCausalLM(model.config).eval()
    run = flexmask_hf.hook_flex_attention(model, **KEEP_ALL)
    other_run = flexmask_hf.hook_flex_attention(other, **KEEP_ALL)
    with flexmask_hf.flexprefill(model, **KEEP_ALL) as block:
        flexmask_hf.unhook_flex_attention(model)
        model(tokens)
    assert [len(each.stats) for each in (block, run)] == [2, 0]
    assert not any(module in RUNS or module in HOOKS for module in model.modules())
    other(tokens)
    assert len(other_run.stats) == 2
    flexmask_hf.unhook_flex_attention(other)
    assert not _HOOKED


def test_only_flex_attention_is_hooked(model):
    with pytest.raises(ValueError, match=r'flex_attention.*got "sdpa"'):
        flexmask_hf.hook_flex_attention(model)
