"""Inspecting a prefill: attention by blocks, the heads shown, refusals."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flexmask.base.inputs import attention_inputs
from flexmask.integrations.huggingface import PrefillSettings, sparse_prefill
from flexmask.integrations.inspect import heads_by_rule, inspect_prefill
from flexmask.integrations.inspect.attention_held import block_attention, held_by_quarter
from flexmask.integrations.inspect.page import NAMED
from tests.attention_calls import call
from tests.expected import masked_attention, visible_pairs
from tests.integrations.common import LENGTH, SPARSE, make_model
from tests.integrations.families import VOCABULARY

CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunk": {"q_len": 45, "kv_len": 100},
    "window": {"scores": {"window": 21}},
    "padded": {"attention_mask": ((torch.arange(70) >= 40) & (torch.arange(70) != 50))[None]},
    "softcap": {"scores": {"softcap": 1.5}},
    "sink": {},
    "unfilled": {"q_len": 45, "kv_len": 100, "q_offset": torch.tensor([20])},
}


def weights(case, **sinks):
    """Attention of every row to every key, (num_heads, q_len, kv_len) float64."""
    keys, visible = torch.eye(case.key.shape[2])[None, None].expand(1, case.key.shape[1], -1, -1), visible_pairs(case)[:, None]
    return masked_attention(case.query, case.key, keys, visible, 0.3, case.scores.get("softcap"), **sinks)[0][0]


@pytest.mark.parametrize("most_scores", [2**24, 200])
@pytest.mark.parametrize("name", CASES)
def test_block_attention_is_a_dense_softmax_pooled_by_blocks(name, most_scores):
    case = call(**{"q_len": 70, "heads": (1, 1), "head_dims": (16, 16), "sharpness": 3.0, **CASES[name]})
    sinks = {"sinks": torch.tensor([0.7])} if name == "sink" else {}
    visible, attention = visible_pairs(case)[0], weights(case, **sinks)[0]
    case.key[:, :, ~visible.any(0)] = math.nan  # what nobody sees does not matter
    inputs = attention_inputs(case.query, case.key, scale=0.3, **case.keywords(), **sinks)
    found = block_attention(inputs, 16, most_scores)
    blocks = zip(attention.split(16), visible.split(16), strict=True)
    expected = torch.tensor([[float(part.sum() / seen.any(1).sum()) for part in rows.split(16, 1)] for rows, seen in blocks])
    assert found.dtype == torch.float32
    assert torch.equal(found.isnan(), expected.isnan())
    assert (found - expected).abs().nan_to_num(0.0).max() < 1e-6
    # something is there to be compared
    assert expected.nansum() > 2


@pytest.mark.parametrize(
    "given", [{}, {"q_len": 61, "kv_len": 200}, {"scores": {"window": 50}}], ids=["whole", "chunk", "window"]
)
def test_held_attention_is_that_of_sampled_rows(given):
    case = call(**{"q_len": 200, "head_dims": (16, 16), "sharpness": 3.0, **given})
    keep = torch.rand((1, 4, -(-case.query.shape[2] // 16), 13)) < 0.5
    found = held_by_quarter(attention_inputs(case.query, case.key, scale=0.3, **case.keywords()), keep, 16, rows=2)
    kept = keep[0].repeat_interleave(16, 1).repeat_interleave(16, 2)[:, : case.query.shape[2], :200]
    taken = [int((number + 0.5) * case.query.shape[2] / 8) for number in range(8)]
    expected = (weights(case) * kept).sum(-1)[:, taken].unflatten(1, (4, 2)).mean(-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


def rows(densities, coverages, patterns):
    return [
        {"layer": number // 2, "head": number % 2, "density": density, "coverage": coverage, "pattern": pattern}
        for number, (density, coverage, pattern) in enumerate(zip(densities, coverages, patterns, strict=True))
    ]


VS = "vertical-slash"


def test_heads_by_rule_follow_their_rule():
    found = heads_by_rule(rows([0.5, 0.1, 0.9, 0.3, 0.7, 1.0], [0.9, 0.95, 0.99, 0.8, 0.9, 1.0], [VS] * 5 + ["dense"]))
    assert found == {(0, 1): "lowest density", (0, 0): "median density", (1, 0): "highest density", (1, 1): "lowest coverage"}
    # one head may be shown for several reasons
    found = heads_by_rule(rows([0.2, 0.4, 0.4, 0.6], [0.5, 0.9, 0.9, 0.9], [VS] * 4))
    assert found == {(0, 0): "lowest density, lowest coverage", (1, 0): "median density", (1, 1): "highest density"}
    assert {layer for layer, _ in heads_by_rule(rows([0.2, 0.4, 0.4, 0.6], [1] * 4, [VS] * 4), layers=[1])} == {1}
    assert heads_by_rule(rows([1.0], [1.0], ["dense"])) == {}


@pytest.fixture(scope="module")
def inspected():
    """Model, prompt, an inspection of layer 1, heads 0 and 3, and the calls of `progress`."""
    model = make_model()
    prompt = torch.randint(1, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
    steps, options = [], {**SPARSE, "dense_layers": (0,), "layers": np.array([1, 1]), "heads": [np.int64(0), 3]}
    found = inspect_prefill(model, prompt, progress=lambda *step: steps.append(step), **options)
    return model, prompt, found, steps


@pytest.mark.attention
def test_inspection_has_the_masks_and_statistics_of_a_prefill(inspected):
    model, prompt, found, steps = inspected
    with torch.no_grad(), sparse_prefill(model, **SPARSE, dense_layers=(0,), collect_masks=True) as run:
        model(prompt[None])
    assert str(found.run.rows()) == str(run.rows())
    assert [(head.layer, head.head, head.why) for head in found.heads] == [(1, 0, NAMED), (1, 3, NAMED)]
    dense = run.masks[1][0].to_dense().bool()[0]
    for head in found.heads:
        assert torch.equal(head.kept, dense[head.head])
        assert 0 < head.attention_kept < 1
        assert head.attention_kept == pytest.approx(float((head.mass * dense[head.head]).sum() / head.mass.sum()))
        assert head.mass.sum(1).tolist() == pytest.approx([1.0] * len(head.mass), abs=1e-5)
    assert steps == [(done, 4) for done in range(1, 5)]
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.attention
def test_inspection_warns_where_the_end_holds_less(inspected):
    found = inspected[2]
    assert list(found.held) == [1]
    assert found.held_by_quarter == pytest.approx(found.held[1])
    assert all(0 < share <= 1 + 1e-6 for share in found.held[1])
    assert found.held[1][3] < 1
    assert replace(found, held={0: (0.9, 0.9, 0.9, 0.85), 1: (0.95, 0.9, 0.9, 0.85)}).warning is None
    warning = replace(found, held={0: (0.9, 0.8, 0.8, 0.7), 1: (1.0, 0.9, 0.9, 0.8)}).warning
    assert "75.0% of the attention of the prompt's last quarter, 95.0% of the first's" in warning
    assert replace(found, held={}).warning is None


@pytest.mark.attention
def test_method_without_a_map_holds_everything():
    found = inspect_prefill(make_model(), torch.arange(LENGTH) % VOCABULARY, method="causal", block_size=32, dense_below=0)
    assert found.held_by_quarter == pytest.approx([1.0] * 4, abs=1e-5)
    assert all(head.attention_kept == pytest.approx(1.0, abs=1e-5) for head in found.heads)
    lost = {0: (1.0, 0.9, 0.9, 0.5)}
    assert replace(found, held=lost).warning.endswith("Let method 'causal' keep more blocks.")
    run = replace(found.run, settings=PrefillSettings(method="flexprefill"))
    assert "Raise gamma" in replace(found, held=lost, run=run).warning


@pytest.mark.attention
def test_attention_that_is_not_finite_is_null_and_no_warning(inspected):
    found = inspected[2]
    broken = replace(
        found, held={1: (math.nan,) * 4}, heads=tuple(replace(each, mass=each.mass * math.nan) for each in found.heads)
    )
    assert broken.warning is None
    again = json.loads(json.dumps(broken.to_dict(), allow_nan=False))
    assert again["held"]["1"] == again["held_by_quarter"] == [None] * 4
    assert [each["attention_kept"] for each in again["shown"]] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": [1, 2]}, TypeError, "input_ids must be a tensor"),
        ({"input_ids": torch.ones(2, 30, dtype=torch.int64)}, ValueError, r"one prompt of at least two tokens; got \(2, 30\)"),
        ({"input_ids": torch.ones(30)}, ValueError, "integer"),
        ({"heads": [0]}, ValueError, "heads must come with layers"),
        ({"layers": [2]}, ValueError, r"layers must be in \[0, 2\); got 2"),
        ({"layers": [0], "heads": [-1]}, ValueError, "heads must be >= 0; got -1"),
        ({"layers": [0], "heads": [0]}, ValueError, "layer 0 ran dense"),
        ({"layers": [0], "heads": [4]}, ValueError, r"heads must be in \[0, 4\) in layer 0; got 4"),
        ({"layers": []}, ValueError, "layers must name at least one"),
        ({"method": lambda query, key, **options: None}, ValueError, "method must be a name to be inspected"),
        ({"gamm": 0.9}, TypeError, "gamm"),
    ],
)
def test_inspection_refuses(arguments, error, message):
    given = {"input_ids": torch.arange(1, 40), **arguments}
    model = make_model()
    with pytest.raises(error, match=message):
        inspect_prefill(model, given.pop("input_ids"), **given)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_is_spread_over_processes_is_refused():
    model = make_model()
    model.model.layers[0].mlp.up_proj.weight.device_mesh = "of a DTensor"
    with pytest.raises(NotImplementedError, match="inspect_prefill does not serve a model spread over processes"):
        inspect_prefill(model, torch.arange(1, 40))
