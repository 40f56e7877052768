"""One process of test_two_processes.py, run by torchrun with a model's folder, a file of tokens and the results' file."""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from flexmask.integrations.huggingface import sparse_prefill


def main(model_folder: str, tokens_file: str, results_file: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, tp_plan="auto").eval()
    data = torch.load(tokens_file)
    tokens = data["tokens"]
    results = {"processes": dist.get_world_size(), "dense": model(tokens).logits}
    for name, options in data["options"].items():
        with torch.no_grad(), sparse_prefill(model, **options) as run:
            results[name] = model(tokens).logits
            results[f"{name}, generated"] = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
        density = run.stats[1][0].density
        shares = [torch.empty_like(density) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, density)
        results[f"{name}, density"], results[f"{name}, density of the others"] = shares
    if dist.get_rank() == 0:
        torch.save(results, results_file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])
