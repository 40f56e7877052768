"""Every family with caches, paddings and prefills, against dense attention and under its masks; other calls; other methods."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.block_masks.positions import causal_mask
from tests.integrations.cells import FEWER_CELLS
from tests.integrations.common import LENGTH, make_model, padded, switchable
from tests.integrations.families import FAMILIES, SIZES
from tests.integrations.support import result_of


@pytest.mark.attention
@pytest.mark.parametrize("cell", FEWER_CELLS, ids=str)
def test_equals_dense_attention(cell):
    result_of(cell)


def made(name: str, **options: Any) -> Any:
    """A tiny random model, or a skip."""
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"no {name} in this release")
    torch.manual_seed(0)
    config = {"Gemma4": "Gemma4TextConfig"}.get(name, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**{**SIZES, **options})).eval()


@pytest.mark.parametrize(
    ("name", "options", "entries"),
    [("Llama", {}, 1), ("DiffLlama", {}, 2), ("HrmText", {"num_hidden_layers": 4, "H_cycles": 1, "L_cycles": 1}, None)],
)
def test_call_is_the_prefill(tokens, name, options, entries):
    model = switchable(made(name, **options))
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


def test_layers_that_share_keys_run_on_the_rows_asked_for(tokens):
    options = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    model = made("Gemma4", **options, global_head_dim=16, sliding_window=64, hidden_size_per_layer_input=8)
    expected = model(tokens, logits_to_keep=1).logits
    with flexmask_hf.sparse_prefill(model) as run:
        logits = model(tokens, logits_to_keep=1).logits
    assert (logits - expected).abs().max() < 1e-4
    assert sorted(run.stats) == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["causal", causal_mask])
@pytest.mark.parametrize("family", ["Llama", "GptOss"])
def test_takes_another_method(tokens, family, method):
    if not FAMILIES[family].available:
        pytest.skip("no such family in this release")
    model = make_model(family)
    model.set_attn_implementation(FAMILIES[family].dense)
    mask = padded(tokens)
    expected = model(tokens, attention_mask=mask).logits
    with flexmask_hf.sparse_prefill(model, method=method, block_size=32, dense_below=0, collect_masks=True) as run:
        logits = model(tokens, attention_mask=mask).logits
    assert (logits - expected)[mask != 0].abs().max() < 1e-4
    assert [len(run.masks[layer]) for layer in (0, 1)] == [1, 1]


@pytest.mark.usefixtures("without_kernel")
def test_method_gets_its_own_options_and_the_scores(model, tokens):
    seen = []

    def method(query, key, *, block_size, keep, scale=None, **visibility):
        seen.append((query.shape, block_size, keep, scale, set(visibility)))
        return causal_mask(query, key, block_size=block_size, **visibility)

    one_head = 40 * 17 * 17  # bytes of one head's mask
    with flexmask_hf.sparse_prefill(model, method=partial(method, keep=3), block_size=32, dense_below=0, max_mask_bytes=one_head):
        model(tokens)
    assert seen == [((1, 1, LENGTH, 16), 32, 3, 0.25, {"window", "attention_mask", "q_offset"})] * 16


def test_method_options_reach_the_method_and_are_saved(model, tokens):
    options = {"method": "minference", "plan": [[30, 60]] * 3 + [[10**6, 0]], "block_size": 32, "dense_below": 0}
    with flexmask_hf.sparse_prefill(model, **options, collect_masks=True, max_mask_bytes=1) as run:
        logits = model(tokens).logits
    kept = run.masks[0][0].to_dense()[0].sum((-2, -1))
    assert (kept[:3] < kept[3]).all()
    flexmask_hf.configure(model, **options)
    model.set_attn_implementation("flexmask")
    torch.testing.assert_close(model(tokens).logits, logits)


def test_function_cannot_be_saved(model):
    with pytest.raises(ValueError, match="method must be a name"):
        flexmask_hf.configure(model, method=causal_mask)
