"""plan: made once, run for many layers; each run gives what sparse_attention gives, or refuses."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import flexmask
from flexmask import plan, sparse_attention
from tests.attention_calls import padding
from tests.repository import ROOT

OWN: dict[str, Any] = {"gamma": 0.9, "min_budget": 16, "min_coverage": 0.0, "last_rows_dense": False}
BLOCKS: dict[str, Any] = {"block_size": 16, "dense_below": 0}
OPTIONS = {**OWN, **BLOCKS}
CHUNK = (63, 200)


def layer(q_len=129, kv_len=129, heads=4, kv_heads=2, batch=2, dim=16):
    """Query, key and value, by which each layer keeps other blocks."""
    query, key, value = (torch.randn(batch, h, n, dim) for h, n in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)))
    return [3 * query, key, value]


KINDS: dict[str, dict[str, Any]] = {
    "plain": OWN,
    "padded": {**OWN, "attention_mask": padding(CHUNK[1], ("left", 9), ("right", 5))},
    "windowed": {**OWN, "window": 100},
    "in groups": {**OWN, "max_mask_bytes": 1},
    "capped": {**OWN, "softcap": 3.0, "scale": 0.3},
    "dense": {**OWN, "dense_below": 2**20},
    "in slices": {"method": "xattention", "threshold": 0.5, "max_mask_bytes": 1},
    "by a user": {"method": lambda query, key, **where: flexmask.hybrid_mask(query, key, **OWN, **where)},
}


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        *((kind, CHUNK) for kind in ("plain", "padded", "in groups", "dense", "by a user")),
        ("windowed", (129, 129)),
        *(pytest.param(kind, CHUNK, marks=pytest.mark.slow) for kind in ("windowed", "capped", "in slices")),
        pytest.param("plain", (127, 127), marks=pytest.mark.slow),
    ],
)
def test_each_run_equals_its_own_call(kind, lengths):
    options = {**BLOCKS, **KINDS[kind]}
    layers, densities = [layer(*lengths) for _ in range(3)], []
    made = plan(*layers[0], **options)
    for tensors in layers:
        out, stats = made.run(*tensors, return_stats=True)
        expected, expected_stats = sparse_attention(*tensors, return_stats=True, **options)
        assert torch.equal(out, expected)
        assert torch.equal(stats.density, expected_stats.density)
        assert stats.dense == expected_stats.dense == (made.reason is not None)
        assert torch.equal(made.run(*tensors), expected)
        densities.append(stats.density)
    # each layer selects for itself
    assert kind == "dense" or (torch.stack(densities).mean() < 0.9 and not torch.equal(densities[0], densities[1]))


def test_layers_have_sinks_of_their_own():
    tensors, sinks = layer(), [torch.randn(4) for _ in range(2)]
    made = plan(*tensors, sinks=sinks[0], **OPTIONS)
    for of_layer in sinks:
        assert torch.equal(made.run(*tensors, sinks=of_layer), sparse_attention(*tensors, sinks=of_layer, **OPTIONS))
    with pytest.raises(TypeError, match="sinks must be a tensor, as planned; got NoneType"):
        made.run(*tensors)


def test_keeps_no_tensor_of_a_layer():
    tensors = layer()
    query, made = weakref.ref(tensors[0]), plan(*tensors, **OPTIONS)
    tensors = None
    gc.collect()
    assert query() is None
    assert made.run(*layer()).shape == (2, 4, 129, 16)


def test_prints_its_shapes_and_why_it_runs_dense():
    query, key, value = layer(63, 200)
    shapes = "query (2, 4, 63, 16), key (2, 2, 200, 16), backend 'cpu'"
    assert repr(plan(query, key, value, **OPTIONS)) == f"Plan(hybrid, {shapes})"
    assert repr(plan(query, key, value)) == f"Plan({shapes}, dense: 200 tokens < dense_below 16384)"


def test_autocast_of_the_run_gives_the_planned_dtype():
    tensors = layer()
    with torch.autocast("cpu", torch.bfloat16):
        made, expected = plan(*tensors, **OPTIONS), sparse_attention(*tensors, **OPTIONS)
        assert torch.equal(made.run(*tensors), expected)
    with pytest.raises(ValueError, match=r"query must have the dtype torch.bfloat16, as planned; got torch.float32"):
        made.run(*tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[:, :, 1:], k, v), r"query must have the shape \(2, 4, 129, 16\), as planned; got \(2, 4, 128, 16\)"),
        (lambda q, k, v: (q, k[:1], v), "key must have the shape"),
        (lambda q, k, v: (q, k, v.half()), "value must have the dtype torch.float32, as planned; got torch.float16"),
        (lambda q, k, v: (q, k, None), "value must be a tensor, as planned; got NoneType"),
        (lambda q, k, v: (q.to_sparse(), k, v), "query must be a plain tensor"),
        (lambda q, k, v: (q.requires_grad_(), k, v), "must not require gradients: the plan was made without"),
        (lambda q, k, v: (q.to("meta"), k, v), "query must hold values"),
    ],
)
def test_refuses_tensors_that_it_was_not_made_for(change, words):
    made = plan(*layer(), **OPTIONS)
    with pytest.raises((TypeError, ValueError), match=words):
        made.run(*change(*layer()))


def test_a_wish_for_statistics_is_true_or_false():
    made = plan(*layer(), **{**OPTIONS, "dense_below": 2**20})
    with pytest.raises(TypeError, match="return_stats must be True or False; got 1"):
        made.run(*layer(), return_stats=1)


def test_a_mode_that_came_later_is_refused():
    from torch.utils.flop_counter import FlopCounterMode

    made, tensors = plan(*layer(), **OPTIONS), layer()
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match="FlopCounterMode"):
        made.run(*tensors)


def test_runs_inside_of_a_compiled_forward():
    layers = [layer() for _ in range(2)]
    made = plan(*layers[0], **OPTIONS)
    compiled = torch.compile(lambda *tensors: made.run(*tensors), fullgraph=True)
    for tensors in layers:
        torch.testing.assert_close(compiled(*tensors), sparse_attention(*tensors, **OPTIONS))


def test_few_functions_run_between_plan_run_and_the_method():
    made, tensors = plan(*layer(), **OPTIONS), layer()
    made.run(*tensors)
    methods = str(ROOT / "block_masks")
    ours, entered, is_there = (str(ROOT / "flexmask"), methods, str(ROOT / "integrations")), set(), False

    def profile(frame, event, _):
        nonlocal is_there
        file, name = str(Path(frame.f_code.co_filename).resolve()), frame.f_code.co_name
        if event == "call" and file.startswith(ours) and not name.startswith("<"):
            is_there = is_there or file.startswith(methods)
            if not is_there:
                entered.add((file, name))

    sys.setprofile(profile)
    try:
        made.run(*tensors)
    finally:
        sys.setprofile(None)
    assert is_there and len(entered) <= 25, entered
    assert len({file for file, _ in entered}) <= 8, entered
