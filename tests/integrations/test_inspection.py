"""Inspecting a prefill: attention by blocks, the heads shown, refusals."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flexmask.base.head_groups import head_groups
from flexmask.base.inputs import attention_inputs
from flexmask.integrations.huggingface import sparse_prefill
from flexmask.integrations.inspect import inspect_prefill, shown_heads
from flexmask.integrations.inspect.coverage_probe import block_attention, coverage_by_quarter
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


@pytest.mark.parametrize("name", CASES)
def test_block_attention_is_a_dense_softmax_pooled_by_blocks(name):
    case = call(**{"q_len": 70, "heads": (1, 1), "head_dims": (16, 16), "sharpness": 3.0, **CASES[name]})
    sinks = {"sinks": torch.tensor([0.7])} if name == "sink" else {}
    visible, attention = visible_pairs(case)[0], weights(case, **sinks)[0]
    case.key[:, :, ~visible.any(0)] = math.nan  # what nobody sees does not matter
    inputs = attention_inputs(case.query, case.key, scale=0.3, **case.keywords(), **sinks)
    found = block_attention(inputs, 16)
    blocks = zip(attention.split(16), visible.split(16), strict=True)
    expected = torch.tensor([[float(part.sum() / seen.any(1).sum()) for part in rows.split(16, 1)] for rows, seen in blocks])
    assert found.dtype == torch.float32
    assert torch.equal(found.isnan(), expected.isnan())
    assert (found - expected).abs().nan_to_num(0.0).max() < 1e-6
    # something is there to be compared
    assert expected.nansum() > 2


@pytest.mark.parametrize("given", [{"q_len": 61, "kv_len": 200}, {"scores": {"window": 50}}], ids=["chunk", "window"])
def test_coverage_by_quarter_is_that_of_sampled_rows(given):
    case = call(**{"q_len": 200, "head_dims": (16, 16), "sharpness": 3.0, **given})
    keep = torch.rand((1, 4, -(-case.query.shape[2] // 16), 13)) < 0.5
    inputs = attention_inputs(case.query, case.key, scale=0.3, **case.keywords())
    heads = head_groups(inputs.query, inputs.key, 1)
    found = torch.stack([coverage_by_quarter(inputs.slice_heads(head), keep[0, at], 16, rows=2) for at, head in enumerate(heads)])
    kept = keep[0].repeat_interleave(16, 1).repeat_interleave(16, 2)[:, : case.query.shape[2], :200]
    taken = [int((number + 0.5) * case.query.shape[2] / 8) for number in range(8)]
    expected = (weights(case) * kept).sum(-1)[:, taken].unflatten(1, (4, 2)).mean(-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


def rows(densities, shares, patterns, statistic="row_coverage"):
    """By layer and head, two heads a layer."""
    unknown = {"row_coverage": math.nan, "coverage": math.nan}
    return {
        divmod(number, 2): {**unknown, "density": density, "pattern": pattern, statistic: share}
        for number, (density, share, pattern) in enumerate(zip(densities, shares, patterns, strict=True))
    }


def test_heads_are_shown_by_density_and_coverage():
    of_hybrid = rows([0.5, 0.1, 0.9, 0.3, 0.7, 1.0], [0.9, 0.95, 0.99, 0.8, 0.9, 1.0], ["hybrid"] * 5 + ["dense"])
    expected = {(0, 1): "lowest density", (0, 0): "median density", (1, 0): "highest density", (1, 1): "lowest coverage"}
    assert shown_heads(of_hybrid) == expected
    # the last rows of hybrid are dense: their share tells nothing
    assert shown_heads({head: {**row, "coverage": 1.0} for head, row in of_hybrid.items()}) == expected
    by_last_rows = rows([0.2, 0.4, 0.4, 0.6], [0.9, 0.9, 0.5, 0.9], ["vertical-slash"] * 4, "coverage")
    assert shown_heads(by_last_rows) == {(0, 0): "lowest density", (1, 0): "median density", (1, 1): "highest density"}
    unknown = rows([0.2, 0.4, 0.4, 0.6], [math.nan] * 4, ["causal"] * 4)
    assert len(shown_heads(unknown)) == 3
    assert shown_heads(rows([1.0], [1.0], ["dense"])) == {}
    assert shown_heads(of_hybrid, [(1, 0), (0, np.int64(0))]) == {(1, 0): "named", (0, 0): "named"}


@pytest.fixture(scope="module")
def inspected():
    """Model, prompt, and an inspection of layer 1, heads 0 and 3."""
    model = make_model()
    prompt = torch.randint(1, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
    return model, prompt, inspect_prefill(model, prompt, heads=[(1, 0), (1, 3)], **SPARSE, dense_layers=(0,))


@pytest.mark.attention
def test_inspection_has_the_masks_and_statistics_of_a_prefill(inspected):
    model, prompt, found = inspected
    with torch.no_grad(), sparse_prefill(model, **SPARSE, dense_layers=(0,), collect_masks=True) as run:
        model(prompt[None])
    assert str(found.run.rows()) == str(run.rows())
    assert [(head.layer, head.head, head.why) for head in found.heads] == [(1, 0, "named"), (1, 3, "named")]
    dense = run.masks[1][0].to_dense().bool()[0]
    for head in found.heads:
        assert torch.equal(head.kept, dense[head.head])
        assert 0 < head.attention_kept < 1
        assert head.attention_kept == pytest.approx(float((head.mass * dense[head.head]).sum() / head.mass.sum()))
        assert head.mass.sum(1).tolist() == pytest.approx([1.0] * len(head.mass), abs=1e-5)
    assert list(found.coverage_by_quarter) == [1]
    shares = found.coverage_by_quarter[1]
    assert len(shares) == 4 and all(0 < share <= 1 + 1e-6 for share in shares) and shares[3] < 1
    assert model.config._attn_implementation == "sdpa"


def test_a_layer_that_is_called_again_shows_its_last_call(without_kernel):
    model, ids = make_model(), torch.randint(1, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
    model.model.layers[1] = model.model.layers[0]
    heads = [(0, head) for head in range(4)]
    found = inspect_prefill(model, ids, heads=heads, **SPARSE)
    first, last = (call.stats.density[0].tolist() for call in found.run.calls[0])
    assert first != last
    shown = [float(head.kept.sum() / head.kept.new_ones(head.kept.shape).tril().sum()) for head in found.heads]
    assert [head.row["density"] for head in found.heads] == last
    assert shown == pytest.approx(last)


@pytest.mark.attention
def test_method_without_a_map_holds_everything():
    found = inspect_prefill(make_model(), torch.arange(LENGTH) % VOCABULARY, method="causal", block_size=32, dense_below=0)
    assert [found.coverage_by_quarter[layer] for layer in (0, 1)] == [pytest.approx([1.0] * 4, abs=1e-5)] * 2
    assert all(head.attention_kept == pytest.approx(1.0, abs=1e-5) for head in found.heads)


@pytest.mark.attention
def test_attention_that_is_not_finite_is_null(inspected):
    found = inspected[2]
    broken = tuple(replace(each, mass=each.mass * math.nan) for each in found.heads)
    changed = replace(found, coverage_by_quarter={1: (math.nan,) * 4}, heads=broken)
    again = json.loads(json.dumps(changed.to_dict(), allow_nan=False))
    assert again["coverage_by_quarter"]["1"] == [None] * 4
    assert [each["attention_kept"] for each in again["shown"]] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": [1, 2]}, TypeError, "input_ids must be a tensor"),
        ({"input_ids": torch.ones(2, 30, dtype=torch.int64)}, ValueError, r"one prompt of at least two tokens; got \(2, 30\)"),
        ({"input_ids": torch.ones(30)}, ValueError, "integer"),
        ({"heads": [0]}, ValueError, "heads must be pairs of a layer and a head that ran sparse; got 0"),
        ({"heads": [(0, 0)]}, ValueError, r"that ran sparse; got \(0, 0\)"),
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
    with pytest.raises(NotImplementedError, match="inspect_prefill does not support a model spread over processes"):
        inspect_prefill(model, torch.arange(1, 40))
