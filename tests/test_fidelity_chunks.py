"""bench.fidelity.chunks: prefill in chunks over one cache, its density, and both beds on small models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import flexmask.integrations.huggingface as flexmask_hf
from bench.fidelity import chunks, smollm, texts
from tests.test_fidelity import tiny_model

pytestmark = pytest.mark.attention


@pytest.mark.parametrize("chunk", [None, 256, 200, 599])
def test_dense_chunks_are_the_whole_prompt(chunk):
    model = tiny_model()
    ids = torch.randint(97, (600,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(chunks.chunked_log_probs(model, ids, chunk), expected, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("without_kernel")
def test_density_is_of_all_blocks():
    model, tokens, chunk = tiny_model(), 896, 256  # the last chunk is short
    ids = torch.randint(97, (tokens,), generator=torch.Generator().manual_seed(1))
    options = {**chunks.options_of_way("hybrid 0.05"), "min_budget": 0, "collect_masks": True}
    with flexmask_hf.flexprefill(model, **options) as run:
        chunks.chunked_log_probs(model, ids, chunk)
    blocks = tokens // 128
    visible = 2 * 4 * blocks * (blocks + 1) // 2
    kept = 0
    for masks in run.masks.values():
        kept += sum(int(mask.to_dense().sum()) for mask in masks)
    assert 0 < kept < visible
    assert chunks.density(run, tokens, chunk) == pytest.approx(kept / visible)


@pytest.mark.slow
def test_both_beds_go_on_where_they_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "load", lambda path, yarn, dtype: tiny_model())
    monkeypatch.setattr(texts, "load", lambda use: {"test/prose/book-0": np.arange(512) * 3 % 97})
    out = tmp_path / "out.jsonl"
    shared = ["--out", str(out), "--ways", "hybrid 0.9", "--chunks", "256"]
    for _ in range(2):
        chunks.main(["texts", "--gguf", "none", "--tokens", "512", *shared])
        chunks.main(["needles", "--tasks", "1024/1", "--prompts", "1", *shared])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["method"] for row in rows] == ["hybrid 0.9, whole", "hybrid 0.9, chunks of 256"] * 2
    assert all(0 < row["density"] <= 1 for row in rows)
    assert all(row["absd"] < 1 for row in rows[:2])
    assert [(row["right"], row["n"]) for row in rows[2:]] == [(1, 1)] * 2
