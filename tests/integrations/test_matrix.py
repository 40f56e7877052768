"""Every family with caches, paddings and prefills, against dense attention and under its masks; other ways to call attention."""

from typing import Any

import pytest
import torch
import transformers

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.cells import FEWER_CELLS
from tests.integrations.common import switchable
from tests.integrations.families import SIZES
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
