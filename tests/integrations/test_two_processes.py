"""A model over two processes, by heads (tp_plan) and by rows (docs/context-parallel.md), gives the results of one."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DynamicCache

from flexmask.integrations.huggingface import sparse_prefill
from tests.repository import ROOT, module_of, python


def in_two_processes(what, folder, model, **asked):
    """The results of `what`, a function of this file, in both processes that torchrun starts on CPUs."""
    model.save_pretrained(folder / "model")
    torch.save(asked, folder / "asked.pt")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    python(*words, __file__, what.__name__, str(folder), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def by_heads(folder, asked):
    """A model whose heads are shared out by `tp_plan`."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
    results = {"processes": dist.get_world_size(), "dense": model(asked["tokens"]).logits}
    for name, options in asked["options"].items():
        with sparse_prefill(model, **options) as run:
            results[name] = model(asked["tokens"]).logits
            results[f"{name}, generated"] = model.generate(asked["tokens"], max_new_tokens=4, do_sample=False, pad_token_id=0)
        results[f"{name}, density"] = run.stats[1][0].density
    return results


def by_rows(folder, asked):
    """A prompt whose rows are shared out by the code of docs/context-parallel.md."""
    dist.init_process_group("gloo")
    page = module_of(folder / "page.py")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    results = {}
    for gamma in (1.0, 0.5):
        logits, cache, run = page.prefill(model, asked["tokens"], asked["bounds"], gamma=gamma, **asked["options"])
        following = logits[:, -1].contiguous()
        dist.broadcast(following, dist.get_world_size() - 1)
        after = model(following.argmax(-1, keepdim=True), past_key_values=cache).logits
        results[f"gamma {gamma}"] = {"logits": logits, "after": after, "density": run.stats[1][0].density}
    return results


BLOCKS: dict[str, Any] = {"method": "flexprefill", "block_size": 64, "min_budget": 0, "dense_below": 0}
BY_HEADS: dict[str, dict[str, Any]] = {
    "whole": {"gamma": 1.0, **BLOCKS},
    "sparse": {"gamma": 0.6, "tau": 0.12, **BLOCKS},
    "by head": {"gamma": [0.9, 0.3, 1.0, 0.5], "layers": {1: {"gamma": [0.2, 1.0, 0.4, 0.7]}}, "tau": 0.12, **BLOCKS},
}


def test_two_processes_of_some_heads_each_give_what_one_gives(tmp_path, model, tokens):
    results, others = in_two_processes(by_heads, tmp_path, model, tokens=tokens, options=BY_HEADS)
    assert results["processes"] == 2
    with torch.no_grad():
        dense = model(tokens).logits
        for name, options in BY_HEADS.items():
            with sparse_prefill(model, **options) as alone:
                logits = model(tokens).logits
                generated = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
            assert (results[name] - logits).abs().max() < 1e-4
            assert torch.equal(results[f"{name}, generated"], generated)
            # the heads of process 0 are the first half
            assert torch.equal(results[f"{name}, density"], alone.stats[1][0].density[:, :2])
            assert torch.equal(others[f"{name}, density"], alone.stats[1][0].density[:, 2:])
    assert (results["dense"] - dense).abs().max() < 1e-4
    assert (results["sparse"] - dense).abs().max() > 1e-2


BY_ROWS: dict[str, Any] = {"block_size": 32, "min_budget": 0, "min_coverage": 0.0, "dense_below": 0}
# a multiple of the block, and a stretch that is longer than the other
BOUND = 320


@pytest.fixture
def code():
    """The page's blocks of code, without the one that starts processes."""
    text = (ROOT / "docs/context-parallel.md").read_text(encoding="utf-8")
    first, _, last = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return SimpleNamespace(prefill=first, bounds=last.partition("\n\n\nmodel =")[0])


@torch.no_grad()
def in_chunks(model, parts, gamma):
    """Logits and densities of the last layer, chunk by chunk, and the next token."""
    cache = DynamicCache(config=model.config)
    prompt_len = sum(part.shape[1] for part in parts)
    with sparse_prefill(model, gamma=gamma, prompt_len=prompt_len, **BY_ROWS) as run:
        logits = [model(part, past_key_values=cache).logits for part in parts]
    following = logits[-1][:, -1:].argmax(-1)
    after = model(following, past_key_values=cache).logits
    return logits, [stats.density for stats in run.stats[1]], after


def test_each_rank_s_rows_are_a_chunk_of_the_prompt(tmp_path, model, tokens, code):
    (tmp_path / "page.py").write_text(code.prefill, encoding="utf-8")
    bounds = [0, BOUND, tokens.shape[1]]
    two = in_two_processes(by_rows, tmp_path, model, tokens=tokens, bounds=bounds, options=BY_ROWS)
    parts = tokens.tensor_split([BOUND], 1)
    whole = in_chunks(model, [tokens], 1.0)[0][0]
    assert torch.cat([each["gamma 1.0"]["logits"] for each in two], 1).sub(whole).abs().max() < 1e-4

    logits, densities, after = in_chunks(model, parts, 0.5)
    for rank, each in enumerate(two):
        found = each["gamma 0.5"]
        assert (found["logits"] - logits[rank]).abs().max() < 1e-4
        assert torch.equal(found["density"], densities[rank])
        # decoding, over the keys of all ranks
        assert (found["after"] - after).abs().max() < 1e-4
        assert found["density"].max() < 1

    # the first rows' blocks are chosen by other last rows than those of the prompt
    sparse = in_chunks(model, [tokens], 0.5)[0][0]
    assert (two[0]["gamma 0.5"]["logits"] - sparse[:, :BOUND]).abs().max() > 1e-2


def test_bounds_share_kept_blocks_and_not_rows(code):
    names: dict[str, Any] = {"torch": torch}
    exec(code.bounds, names)
    causal = torch.arange(1, 101)
    assert names["bounds_of"](causal, 2, 64, 6390) == [0, 71 * 64, 6390]
    assert names["bounds_of"](causal, 3, 64, 6390) == [0, 58 * 64, 82 * 64, 6390]
    assert names["bounds_of"](torch.ones(100), 2, 64, 6400) == [0, 50 * 64, 6400]
    mask = SimpleNamespace(kv_num_blocks=torch.ones(1, 2, 3), full_kv_num_blocks=torch.arange(3).expand(1, 2, 3))
    assert names["kept_blocks"](SimpleNamespace(masks={0: [mask, None], 1: [mask]})).tolist() == [4, 8, 12]


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    with torch.no_grad():
        found = {"by_heads": by_heads, "by_rows": by_rows}[sys.argv[1]](folder, torch.load(folder / "asked.pt"))
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
