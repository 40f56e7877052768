"""One process of test_two_processes.py, run by torchrun with ``heads`` or ``rows`` and the folder of what is asked."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from flexmask.integrations.huggingface import sparse_prefill
from tests.repository import module_of


def heads(folder, asked):
    """A model whose heads are shared out by `tp_plan`."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
    results = {"processes": dist.get_world_size(), "dense": model(asked["tokens"]).logits}
    for name, options in asked["options"].items():
        with sparse_prefill(model, **options) as run:
            results[name] = model(asked["tokens"]).logits
            results[f"{name}, generated"] = model.generate(asked["tokens"], max_new_tokens=4, do_sample=False, pad_token_id=0)
        results[f"{name}, density"] = run.stats[1][0].density
    return results


def rows(folder, asked):
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


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    with torch.no_grad():
        found = {"heads": heads, "rows": rows}[sys.argv[1]](folder, torch.load(folder / "asked.pt"))
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
