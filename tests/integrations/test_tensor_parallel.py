"""A model over two processes by transformers' tp_plan gives the results of one."""

from typing import Any

import torch

from flexmask.integrations.huggingface import sparse_prefill
from tests.integrations.common import in_two_processes

BLOCKS: dict[str, Any] = {"method": "flexprefill", "block_size": 64, "min_budget": 0, "dense_below": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {"gamma": 1.0, **BLOCKS},
    "sparse": {"gamma": 0.6, "tau": 0.12, **BLOCKS},
    "by head": {"gamma": [0.9, 0.3, 1.0, 0.5], "layers": {1: {"gamma": [0.2, 1.0, 0.4, 0.7]}}, "tau": 0.12, **BLOCKS},
}


def test_two_processes_give_what_one_gives(tmp_path, model, tokens):
    model.save_pretrained(tmp_path / "model")
    torch.save({"tokens": tokens, "options": OPTIONS}, tmp_path / "tokens.pt")
    in_two_processes("tensor_parallel.py", *(tmp_path / name for name in ("model", "tokens.pt", "results.pt")))
    results = torch.load(tmp_path / "results.pt")
    assert results["processes"] == 2
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
