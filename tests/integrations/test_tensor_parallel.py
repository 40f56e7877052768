"""A model over two processes by transformers' tp_plan gives the results of one."""

import os
import subprocess
import sys
from typing import Any

import torch

from flexmask.integrations.huggingface import sparse_prefill
from tests.integrations.families import FAMILIES
from tests.repository import ROOT

BLOCKS: dict[str, Any] = {"method": "flexprefill", "block_size": 64, "min_budget": 0, "dense_below": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {"gamma": 1.0, **BLOCKS},
    "sparse": {"gamma": 0.6, "tau": 0.12, **BLOCKS},
    "by head": {"gamma": [0.9, 0.3, 1.0, 0.5], "layers": {1: {"gamma": [0.2, 1.0, 0.4, 0.7]}}, "tau": 0.12, **BLOCKS},
}


def results_of_two_processes(folder, model, tokens, surroundings):
    """Results of process 0 of two, under torchrun."""
    model.save_pretrained(folder / "model")
    torch.save({"tokens": tokens, "options": OPTIONS}, folder / "tokens.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [str(folder / name) for name in ("model", "tokens.pt", "results.pt")]
    run = subprocess.run(
        [*command, str(ROOT / "tests/integrations/tensor_parallel.py"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **surroundings},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results = torch.load(folder / "results.pt")
    assert results["processes"] == 2
    return results


def test_two_processes_give_what_one_gives(tmp_path, tokens):
    model = FAMILIES["Llama"].make()
    results = results_of_two_processes(tmp_path, model, tokens, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    with torch.no_grad():
        dense = model(tokens).logits
        for name, options in OPTIONS.items():
            with sparse_prefill(model, **options) as alone:
                logits = model(tokens).logits
                generated = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
            assert (results[name] - logits).abs().max() < 1e-4
            assert torch.equal(results[f"{name}, generated"], generated)
            # the heads of process 0 are the first half
            assert torch.equal(results[f"{name}, density"], alone.stats[1][0].density[:, :2])
            assert torch.equal(results[f"{name}, density of the others"], alone.stats[1][0].density[:, 2:])
    assert (results["dense"] - dense).abs().max() < 1e-4
    assert (results["sparse"] - dense).abs().max() > 1e-2
