"""Inspecting a prefill: attention by blocks, the heads shown, refusals."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flexmask.base.inputs import AttentionInputs
from flexmask.integrations.huggingface import PrefillSettings, sparse_prefill
from flexmask.integrations.inspect import inspect_prefill
from flexmask.integrations.inspect.attention_held import block_attention, held_by_quarter
from flexmask.integrations.inspect.inspection import NAMED, heads_by_rule
from tests.integrations.common import LENGTH, SPARSE, make_model
from tests.integrations.families import VOCABULARY


def dense_block_map(query, key, visible, scale, block_size, softcap=None, sink=None):
    """Softmax pooled by blocks, in float64 and loops."""
    scores = query.double() @ key.double().T * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, torch.full((len(query), 1), sink, dtype=torch.float64)], 1)
    attention = scores.softmax(-1).nan_to_num(0.0)[:, : len(key)]
    found = []
    for rows, seen in zip(attention.split(block_size), visible.split(block_size), strict=True):
        valid = seen.any(1).sum()
        found.append([float(part.sum() / valid) if valid else math.nan for part in rows.split(block_size, 1)])
    return torch.tensor(found)


@pytest.mark.parametrize("most_scores", [2**24, 200])
@pytest.mark.parametrize("case", ["whole", "chunk", "window", "padded", "softcap", "sink", "unfilled"])
def test_block_attention_is_a_dense_softmax_pooled_by_blocks(case, most_scores):
    generator = torch.Generator().manual_seed(0)
    q_len, kv_len = (70, 70) if case not in ("chunk", "unfilled") else (45, 100)
    query, key = torch.randn((q_len, 16), generator=generator), 2 * torch.randn((kv_len, 16), generator=generator)
    start = {"unfilled": 20}.get(case, kv_len - q_len)
    position, column = torch.arange(start, start + q_len)[:, None], torch.arange(kv_len)
    visible, given, own = column <= position, {}, {}
    if case == "window":
        given["window"] = 21
        visible = visible & (column > position - 21)
    if case == "padded":
        tokens = torch.ones(1, kv_len, dtype=torch.bool)
        tokens[:, :40] = tokens[:, 50] = False
        given["attention_mask"] = tokens
        visible = visible & tokens & tokens[0, position]
        key[:40] = math.nan  # what padding holds does not matter
    if case == "softcap":
        given["softcap"] = own["softcap"] = 1.5
    if case == "sink":
        given["sinks"], own["sink"] = torch.tensor([0.7]), 0.7
    if case == "unfilled":
        given["offset"] = torch.tensor([start], dtype=torch.int32)
        key[start + q_len :] = math.nan
    inputs = AttentionInputs(query[None, None], key[None, None], None, 0.3, **given)
    found = block_attention(inputs, 16, most_scores)
    expected = dense_block_map(query, key.nan_to_num(0.0), visible, 0.3, 16, **own)
    assert found.dtype == torch.float32
    assert torch.equal(found.isnan(), expected.isnan())
    assert (found - expected).abs().nan_to_num(0.0).max() < 1e-6
    # something is there to be compared
    assert expected.nansum() > 2.5


@pytest.mark.parametrize("case", ["whole", "chunk", "window"])
def test_held_attention_is_that_of_sampled_rows(case):
    generator = torch.Generator().manual_seed(0)
    q_len, kv_len, block_size, window = (61 if case == "chunk" else 200), 200, 16, 50 if case == "window" else None
    query = torch.randn((1, 4, q_len, 16), generator=generator)
    key = 2 * torch.randn((1, 2, kv_len, 16), generator=generator)
    keep = torch.rand((1, 4, -(-q_len // block_size), -(-kv_len // block_size)), generator=generator) < 0.5
    found = held_by_quarter(AttentionInputs(query, key, None, 0.3, window=window), keep, block_size, rows=2)
    taken = [int((number + 0.5) * q_len / 8) for number in range(8)]
    for head in range(4):
        shares = []
        for row in taken:
            position = kv_len - q_len + row
            first = max(0, position - window + 1) if window else 0
            scores = key[0, head // 2, first : position + 1].double() @ query[0, head, row].double() * 0.3
            kept = keep[0, head, row // block_size, torch.arange(first, position + 1) // block_size]
            shares.append(float(scores.softmax(0)[kept].sum()))
        expected = [sum(shares[2 * quarter : 2 * quarter + 2]) / 2 for quarter in range(4)]
        assert found[head].tolist() == pytest.approx(expected, abs=1e-6)


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
    steps = []
    found = inspect_prefill(
        model,
        prompt,
        layers=np.array([1, 1]),
        heads=[np.int64(0), 3],
        progress=lambda done, of: steps.append((done, of)),
        **SPARSE,
        dense_layers=(0,),
    )
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
    assert warning is not None
    assert "75.0% of the attention of the prompt's last quarter, 95.0% of the first's" in warning
    assert replace(found, held={}).warning is None


@pytest.mark.attention
def test_method_without_a_map_holds_everything():
    found = inspect_prefill(make_model(), torch.arange(LENGTH) % VOCABULARY, method="causal", block_size=32, dense_below=0)
    assert found.held_by_quarter == pytest.approx([1.0] * 4, abs=1e-5)
    assert all(head.attention_kept == pytest.approx(1.0, abs=1e-5) for head in found.heads)
    lost = {0: (1.0, 0.9, 0.9, 0.5)}
    warning = replace(found, held=lost).warning
    assert warning is not None
    assert warning.endswith("Let method 'causal' keep more blocks.")
    run = replace(found.run, settings=PrefillSettings(method="flexprefill"))
    assert "Raise gamma" in (replace(found, held=lost, run=run).warning or "")


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
