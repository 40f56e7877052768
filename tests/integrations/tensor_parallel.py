"""One process of test_tensor_parallel.py, run by torchrun with a model's folder, a file of tokens and the results' file."""

import json
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from flexmask.integrations.huggingface import sparse_prefill


def main(model_folder: str, tokens_file: str, results_file: str) -> None:
    on_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(model_folder, tp_plan="auto").eval()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    data = torch.load(tokens_file)
    tokens = data["tokens"].to(device)
    results = {"processes": dist.get_world_size(), "dense": model(tokens).logits.cpu()}
    for name, options in data["options"].items():
        with torch.no_grad(), sparse_prefill(model, **options) as run:
            results[name] = model(tokens).logits.cpu()
            results[f"{name}, generated"] = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0).cpu()
        density = run.stats[1][0].density
        shares = [torch.empty_like(density) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, density)
        results[f"{name}, density"], results[f"{name}, density of the others"] = (share.cpu() for share in shares)
    if dist.get_rank() == 0:
        torch.save(results, results_file)
        print(json.dumps({name: list(x.shape) for name, x in results.items() if isinstance(x, torch.Tensor)}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])
