"""Every family with caches, paddings and prefills, against dense attention and under its masks; other calls and methods."""

from functools import partial

import pytest
import torch
import transformers

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.block_masks.positions import causal_mask
from flexmask.integrations.huggingface.compat import group_function
from tests.integrations.common import LENGTH, RELEASE, SPARSE, made, padded, switchable
from tests.integrations.families import SIZES
from tests.integrations.support import FEWER_CELLS, result_of


@pytest.mark.attention
@pytest.mark.parametrize("cell", FEWER_CELLS, ids=str)
def test_equals_dense_attention(cell):
    refused = result_of(cell).refused
    if refused:
        assert RELEASE < (5, 1), "later releases run every cell"
        pytest.skip(refused)


@pytest.mark.parametrize(
    ("name", "options", "entries"),
    [("Llama", {}, 1), ("DiffLlama", {}, 2), ("HrmText", {"num_hidden_layers": 4, "H_cycles": 1, "L_cycles": 1}, None)],
)
def test_the_column_call_is_the_number_of_the_prefill(tokens, name, options, entries):
    model = switchable(made(f"{name}ForCausalLM", f"{name}Config", **{**SIZES, **options}))
    with flexmask_hf.sparse_prefill(model) as run:
        model(tokens[:, :100])
        model(tokens)
    calls = {layer: sorted({row["call"] for row in run.rows() if row["layer"] == layer}) for layer in run.stats}
    assert set(map(tuple, calls.values())) == {(0, 1)}
    if entries is not None:
        assert [len(each) for each in run.stats.values()] == [2 * entries] * 2


def test_layers_without_an_index_are_told_apart(model, tokens):
    for layer in model.model.layers:
        del layer.self_attn.layer_idx
    with flexmask_hf.sparse_prefill(model, dense_below=0, dense_layers=(0, 1)) as run:
        model(tokens, use_cache=False)
    assert sorted(run.stats) == [0, 1]
    assert run.reasons == {0: ["in dense_layers"], 1: ["in dense_layers"]}


def test_layers_without_an_index_have_no_layer_s_options_outside_of_a_block(model, tokens):
    flexmask_hf.register()
    for layer in model.model.layers:
        del layer.self_attn.layer_idx
    logits = []
    for layers in ({}, {0: {"gamma": 1.0}}):
        flexmask_hf.configure(model, **SPARSE, layers=layers)
        model.set_attn_implementation("flexmask")
        logits.append(model(tokens, use_cache=False).logits)
    assert torch.equal(*logits)


def test_layers_that_share_keys_run_on_the_rows_asked_for(tokens):
    options = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    options |= {"global_head_dim": 16, "sliding_window": 64, "hidden_size_per_layer_input": 8}
    model = made("Gemma4ForCausalLM", "Gemma4TextConfig", **{**SIZES, **options})
    expected = model(tokens, logits_to_keep=1).logits
    with flexmask_hf.sparse_prefill(model) as run:
        logits = model(tokens, logits_to_keep=1).logits
    assert (logits - expected).abs().max() < 1e-4
    assert sorted(run.stats) == [0, 1, 2, 3]


@pytest.mark.attention
def test_a_function_gets_its_own_options_and_the_scores_and_serves(model, tokens):
    seen = []

    def method(query, key, *, block_size, keep, scale=None, **visibility):
        seen.append((query.shape, block_size, keep, scale, set(visibility)))
        return causal_mask(query, key, block_size=block_size, **visibility)

    mask, one_head = padded(tokens), 40 * 17 * 17  # bytes of one head's mask
    expected = model(tokens, attention_mask=mask).logits
    options = {"method": partial(method, keep=3), "block_size": 32, "dense_below": 0, "max_mask_bytes": one_head}
    with flexmask_hf.sparse_prefill(model, **options):
        assert (model(tokens, attention_mask=mask).logits - expected)[mask != 0].abs().max() < 1e-4
    batch, heads = tokens.shape[0], model.config.num_attention_heads
    assert seen == [((batch, heads, LENGTH, 16), 32, 3, 0.25, {"window", "attention_mask", "q_offset"})] * 2


def test_method_options_reach_the_method_and_are_saved(model, tokens):
    options = {"method": "minference", "plan": [[30, 60]] * 3 + [[10**6, 0]], "block_size": 32, "dense_below": 0}
    with flexmask_hf.sparse_prefill(model, **options, collect_masks=True, max_mask_bytes=1) as run:
        logits = model(tokens).logits
    kept = run.masks[0][0].to_dense()[0].sum((-2, -1))
    assert (kept[:3] < kept[3]).all()
    flexmask_hf.configure(model, **options)
    with pytest.raises(ValueError, match="method must be a name"):
        flexmask_hf.configure(model, method=causal_mask)
    model.set_attn_implementation("flexmask")
    torch.testing.assert_close(model(tokens).logits, logits)


images = pytest.mark.skipif(group_function is None, reason="this release marks images by other functions")
TOKENS = torch.randint(0, 100, (2, LENGTH), generator=torch.Generator().manual_seed(7))
TEXT = torch.zeros_like(TOKENS)


def multimodal():
    """A Gemma 3 with layers of both kinds."""
    text = {**SIZES, "vocab_size": 128, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100}
    image = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    image |= {"image_size": 28, "patch_size": 14}
    names = {"image_token_id": 127, "boi_token_id": 126, "eoi_token_id": 125}
    config = transformers.Gemma3Config(text_config=text, vision_config=image, mm_tokens_per_image=4, **names)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


@pytest.mark.attention
@images
@pytest.mark.parametrize(
    "arguments", [{}, {"attention_mask": padded(TOKENS)}, {"use_cache": False}], ids=["plain", "padded", "without a cache"]
)
def test_a_text_with_types_of_tokens_is_served_as_one_without(arguments):
    model = multimodal()
    with flexmask_hf.sparse_prefill(model, **SPARSE) as run:
        found = model(TOKENS, token_type_ids=TEXT, **arguments).logits
        expected = model(TOKENS, **arguments).logits
    assert torch.equal(found, expected)
    assert [call.density.mean() < 1 for calls in run.stats.values() for call in calls] == [True] * 4
    with flexmask_hf.sparse_prefill(model, dense_below=LENGTH + 1):
        dense = model(TOKENS, token_type_ids=TEXT, **arguments).logits
    assert (found - dense).abs().max() > 1e-3


@pytest.mark.attention
@images
@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"prefill_chunk_size": 200}], ids=str)
def test_generation_from_a_text_with_types_of_tokens(options):
    model, given = multimodal(), {"token_type_ids": TEXT, "max_new_tokens": 3, "do_sample": False, **options}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    own = model.generate(TOKENS, **given)
    with flexmask_hf.sparse_prefill(model, dense_below=0, gamma=1.0, method="flexprefill", block_size=32):
        found = model.generate(TOKENS, **given)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(own.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.attention
@images
def test_an_image_among_the_tokens_is_refused():
    model, types = multimodal(), TEXT.clone()
    types[1, 200:204] = 1
    with flexmask_hf.sparse_prefill(model, **SPARSE), pytest.raises(NotImplementedError, match="a bidirectional part"):
        model(TOKENS, token_type_ids=types)
