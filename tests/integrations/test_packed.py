"""Packed prompts in the adapter: each sequence runs as it does alone."""

import itertools
from typing import Any

import pytest
import torch

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.common import KEEP_ALL, LENGTH, SPARSE, make_model

pytestmark = pytest.mark.attention

BOUNDS = [0, 200, 201, 240, LENGTH]  # two that get a mask, a single token and a short one
# those with fewer tokens run dense
OPTIONS: dict[str, dict[str, Any]] = {
    "everything kept": {**KEEP_ALL, "dense_below": 100, "gamma": 0.9, "min_budget": 10**6},
    "gamma 1": {**KEEP_ALL, "dense_below": 100},
    "sparse": {**SPARSE, "dense_below": 100},
    "another method": {"method": "streaming_llm", "block_size": 32, "dense_below": 100, "sink_blocks": 1, "window_blocks": 2},
    "a dense layer": {**SPARSE, "dense_below": 100, "dense_layers": (0,)},
}


def positions_of(bounds):
    return torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(bounds)])[None]


def arguments(form, bounds=BOUNDS):
    """A collator's keywords: restarting positions, bounds by flash-attn's names, or both with bounds in lists."""
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    positions = {} if form == "bounds" else {"position_ids": positions_of(bounds)}
    bounds = bounds if form == "lists" else torch.tensor(bounds, dtype=torch.int32)
    flash = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return {"use_cache": False, **positions, **({} if form == "positions" else flash)}


def one_by_one(model, tokens, bounds=BOUNDS):
    return torch.cat([model(tokens[:, start:end], use_cache=False).logits for start, end in itertools.pairwise(bounds)], 1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "another method" else name for name in OPTIONS]
)
def test_packed_sequences_run_as_alone(model, tokens, name):
    tokens, dense = tokens[:1], one_by_one(model, tokens[:1])
    with flexmask_hf.sparse_prefill(model, **OPTIONS[name]) as run:
        expected = one_by_one(model, tokens)
        alone = run.stats
        run.reset()
        logits = model(tokens, **arguments("positions")).logits
    assert (logits - expected).abs().max() < 1e-4
    if name in ("everything kept", "gamma 1"):
        assert (logits - dense).abs().max() < 1e-4
    else:
        assert (logits - dense).abs().max() > 1e-2
    assert (logits - model(tokens, use_cache=False).logits).abs().max() > 1e-2
    # a single token is a decoding step, which leaves no statistics
    for layer, calls in run.stats.items():
        one_less = calls[:1] + calls[2:]
        assert [each.dense for each in one_less] == [each.dense for each in alone[layer]]
        if name == "sparse":
            assert all(torch.equal(each.density, own.density) for each, own in zip(one_less, alone[layer], strict=True))


def test_statistics_name_the_sequence_of_a_pack(model, tokens):
    with flexmask_hf.sparse_prefill(model, **OPTIONS["sparse"], collect_masks=True) as run:
        model(tokens[:1, :50])
        model(tokens[:1], **arguments("positions"))
    rows = [row for row in run.rows() if row["layer"] == 1 and row["head"] == 0]
    assert [(row["call"], row["sequence"]) for row in rows] == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert [row["reason"] for row in rows] == [f"{n} tokens < dense_below 100" if n else None for n in (50, 0, 1, 39, 0)]
    assert [None if mask is None else mask.shape[2] for mask in run.masks[1]] == [None, 200, None, None, 290]


def test_rows_of_a_batch_are_packed_each(model, tokens):
    """Rows without a restart count as one sequence."""
    positions = torch.cat([positions_of(BOUNDS), torch.arange(LENGTH)[None]])
    with flexmask_hf.sparse_prefill(model, **OPTIONS["gamma 1"]) as run:
        logits = model(tokens, position_ids=positions, use_cache=False).logits
        assert (logits[:1] - one_by_one(model, tokens[:1])).abs().max() < 1e-4
        assert (logits[1:] - model(tokens[1:], use_cache=False).logits).abs().max() < 1e-4
    assert [row["sequence"] for row in run.rows() if row["layer"] == row["head"] == 0 and row["call"] == 0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("form", ["positions", "bounds"])
@pytest.mark.parametrize("family", ["Llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("Mistral", "Gemma2"))])
def test_windows_and_soft_caps_count_within_a_sequence(family, form, tokens):
    model = make_model(family)
    dense = one_by_one(model, tokens[:1])
    with flexmask_hf.sparse_prefill(model, **OPTIONS["everything kept"]):
        assert (model(tokens[:1], **arguments(form)).logits - dense).abs().max() < 1e-4


def test_a_model_that_masks_without_positions_takes_bounds_alone(tokens):
    model = make_model("GptOss")
    with flexmask_hf.sparse_prefill(model):
        assert (model(tokens[:1], **arguments("bounds")).logits - one_by_one(model, tokens[:1])).abs().max() < 1e-4
        with pytest.raises(NotImplementedError, match=r"masks without position_ids; .* cu_seq_lens_k without position_ids$"):
            model(tokens[:1], **arguments("lists"))


def test_collator_of_transformers_makes_what_is_served(model, tokens):
    from transformers import DataCollatorWithFlattening

    try:
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    except TypeError:
        pytest.skip("this release's collator gives positions alone")
    prompts = [{"input_ids": tokens[0, start:end].tolist()} for start, end in itertools.pairwise(BOUNDS)]
    batch = {name: value for name, value in collator(prompts).items() if name != "labels"}
    with flexmask_hf.sparse_prefill(model, **OPTIONS["gamma 1"]):
        logits = model(**batch, use_cache=False).logits
    assert (logits - one_by_one(model, tokens[:1])).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cu_seq_lens_k": None}, ValueError, r"cu_seq_lens_q and cu_seq_lens_k must come together; got cu_seq_lens_q alone"),
        ({"cu_seq_lens_q": torch.tensor([0, LENGTH + 1])}, ValueError, r"cu_seq_lens_q must end at total_q = 530; got 531"),
        ({"cu_seq_lens_k": torch.tensor([0.0])}, TypeError, r"cu_seq_lens_k must be integer"),
        ({"use_cache": True, "position_ids": positions_of(BOUNDS)}, NotImplementedError, "packed sequences"),
        ({"position_ids": positions_of([0, 100, LENGTH])}, ValueError, r"must bound the same sequences as position_ids"),
        (
            {"attention_mask": torch.arange(LENGTH)[None] > 5},
            NotImplementedError,
            r"packed sequences \(cu_seq_lens_q\) over a cache or under an attention_mask; use one prompt per batch row",
        ),
    ],
)
def test_what_does_not_fit_a_pack_is_refused(model, tokens, changes, error, message):
    with flexmask_hf.sparse_prefill(model), pytest.raises(error, match=message):
        model(tokens[:1], **{**arguments("bounds"), **changes})


@pytest.mark.parametrize(("compiled", "form"), [("layers", "positions"), ("layers", "lists"), ("model", "lists")])
def test_compiled_code_keeps_sequences_apart(model, tokens, compiled, form):
    expected, run = one_by_one(model, tokens[:1]), model
    if compiled == "model":
        run = torch.compile(model.forward, backend="eager")
    else:
        for layer in model.model.layers:
            layer.self_attn.compile(backend="eager")
    with flexmask_hf.sparse_prefill(model, **OPTIONS["gamma 1"]):
        logits = run(tokens[:1], **arguments(form)).logits
    assert (logits - expected).abs().max() < 1e-4
