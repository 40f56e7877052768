"""One process of test_two_processes.py, run by torchrun with a folder: what is asked, the page's code, and the results."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.repository import module_of


@torch.no_grad()
def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    page = module_of(folder / "page.py")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    asked = torch.load(folder / "asked.pt")
    results = {}
    for gamma in (1.0, 0.5):
        logits, cache, run = page.prefill(model, asked["tokens"], asked["bounds"], gamma=gamma, **asked["options"])
        following = logits[:, -1].contiguous()
        dist.broadcast(following, dist.get_world_size() - 1)
        after = model(following.argmax(-1, keepdim=True), past_key_values=cache).logits
        results[f"gamma {gamma}"] = {"logits": logits, "after": after, "density": run.stats[1][0].density}
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
