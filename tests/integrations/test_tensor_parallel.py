"""A model spread over two processes by transformers' tp_plan: the same results as in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from flexmask.integrations.huggingface import flexprefill
from tests.integrations.families import FAMILIES, VOCABULARY

ROOT = Path(__file__).resolve().parents[2]
BLOCKS: dict[str, Any] = {"block_size": 32, "min_budget": 0, "dense_below": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {"gamma": 1.0, **BLOCKS},
    "sparse": {"gamma": 0.6, "tau": 0.12, **BLOCKS},
}


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    model = FAMILIES["Llama"].make()
    tokens = torch.randint(1, VOCABULARY, (2, 530), generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "model")
    torch.save({"tokens": tokens, "options": OPTIONS}, tmp_path / "tokens.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [str(tmp_path / name) for name in ("model", "tokens.pt", "results.pt")]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(ROOT / "tests/integrations/tensor_parallel.py"), *arguments],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results = torch.load(tmp_path / "results.pt")
    assert results["processes"] == 2
    with torch.no_grad():
        dense = model(tokens).logits
        for name, options in OPTIONS.items():
            with flexprefill(model, **options) as alone:
                logits = model(tokens).logits
                generated = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
            assert (results[name] - logits).abs().max() < 1e-4
            assert torch.equal(results[f"{name}, generated"], generated)
            # the heads of process 0 are the first half
            assert torch.equal(results[f"{name}, density"], alone.stats[1][0].density[:, :2])
    assert (results["dense"] - dense).abs().max() < 1e-4
    assert (results["sparse"] - dense).abs().max() > 1e-2
