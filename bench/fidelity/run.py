"""Measure selections: ``python -m bench.fidelity.run --bed R --use tune --configs FILE --out FILE.jsonl --minutes 6``."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from bench.fidelity import rules, smollm, texts
from bench.fidelity.sparse_model import B, attending, prepare, sparse_attention
from bench.retriever.task import make_prompt

TASKS = ((16384, 1), (16384, 64), (32768, 1))
NO_METHOD = "dense"


class Log:
    """JSON lines, written at once."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")

    def write(self, **entry: Any) -> None:
        """Add a line."""
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()


def method_of(config: str) -> Any:
    """None for dense attention, else the method."""
    return None if config == NO_METHOD else rules.parse(config)


def density(layers: list[Tensor]) -> tuple[float, list[float]]:
    """Mean over layers and heads; by layer."""
    if not layers:
        return 1.0, []
    by_layer = torch.stack([layer.mean() for layer in layers])
    return by_layer.mean().item(), [round(x, 4) for x in by_layer.tolist()]


@torch.no_grad()
def log_probs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probability of every next token, (tokens - 1,) float32."""
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
    parts = zip(hidden.split(4096), ids[1:].split(4096), strict=True)
    return torch.cat([-F.cross_entropy(model.lm_head(part).float(), target, reduction="none") for part, target in parts])


def measure_texts(model: PreTrainedModel, configs: list[str], chosen: dict[str, Tensor], log: Log, stop: float, use: str) -> None:
    """Every configuration on every text against dense attention."""
    with attending(None):
        dense = {name: log_probs(model, ids) for name, ids in chosen.items()}
    for name, each in dense.items():
        quarters = [round(-part.mean().item(), 4) for part in each.chunk(4)]
        log.write(bed="R", use=use, config=NO_METHOD, text=name, density=1.0, loss=-each.mean().item(), loss_quarters=quarters)
        print(name, quarters, flush=True)
    for config in configs:
        method = method_of(config)
        for name, ids in chosen.items():
            if time.monotonic() > stop:
                print("out of time before", config, name, flush=True)
                return
            start = time.monotonic()
            try:
                with attending(method) as layers:
                    found = log_probs(model, ids)
                kept, by_layer = density(layers)
            except Exception as error:  # one bad configuration must not end the run
                print("FAILED", config, name, repr(error)[:500], flush=True)
                log.write(bed="R", config=config, text=name, error=repr(error)[:500])
                break
            change = found - dense[name]
            log.write(
                bed="R",
                use=use,
                config=config,
                text=name,
                density=kept,
                dloss=-change.mean().item(),
                absd=change.abs().mean().item(),
                absq=[round(part.abs().mean().item(), 4) for part in change.chunk(4)],
                layers=by_layer,
                s=round(time.monotonic() - start, 3),
            )


@torch.no_grad()
def answers(model: PreTrainedModel, method: Any, token_ids: Tensor) -> tuple[Tensor, float]:
    """Four greedy tokens after each prompt, prefilled with `method` and decoded dense, (batch, 4); density of the prefill."""
    cache = DynamicCache(config=model.config)
    with attending(method) as layers:
        logits = model(input_ids=token_ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    kept, _ = density(layers)
    found = [logits.argmax(-1)]
    for _ in range(3):
        logits = model(input_ids=found[-1][:, None], past_key_values=cache).logits[:, -1]
        found.append(logits.argmax(-1))
    return torch.stack(found, 1), kept


def measure_needles(
    model: PreTrainedModel, configs: list[str], tasks: tuple[tuple[int, int], ...], prompts: int, log: Log, stop: float
) -> None:
    """Every configuration on every retrieval task."""
    device = model.device
    drawn = {task: [make_prompt(*task, 1, seed) for seed in range(1000, 1000 + prompts)] for task in tasks}
    for config in configs:
        method = method_of(config)
        start = time.monotonic()
        for (length, needles), each in drawn.items():
            if time.monotonic() > stop:
                print("out of time before", config, flush=True)
                return
            right, kept = [], []
            per = max(1, 131072 // length)
            try:
                for i in range(0, len(each), per):
                    part = each[i : i + per]
                    found, share = answers(model, method, torch.stack([p.token_ids for p in part]).to(device))
                    right += (found.cpu() == torch.cat([p.answers for p in part])).all(1).tolist()
                    kept.append(share)
            except Exception as error:  # one bad configuration must not end the run
                print("FAILED", config, length, needles, repr(error)[:500], flush=True)
                log.write(bed="N", config=config, task=f"{length}/{needles}", error=repr(error)[:500])
                break
            share = sum(kept) / len(kept)
            seconds = round(time.monotonic() - start, 3)
            log.write(
                bed="N", config=config, task=f"{length}/{needles}", density=share, right=sum(right), n=len(right), s=seconds
            )


def read_configs(path: Path) -> list[str]:
    """One method a line, each once, without comments."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    return list(dict.fromkeys(filter(None, lines)))


def check_kernel(device: str) -> None:
    """Compare the sparse kernel with SDPA under the same map."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 9, 2048, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    keep = rules.finish(torch.rand(1, 9, 16, 16, device=device) < 0.3)
    out = sparse_attention(query, key, value, keep, 0.125)
    seen = keep.repeat_interleave(B, -2).repeat_interleave(B, -1).tril()
    expected = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=seen, scale=0.125)
    error = ((out.float() - expected).norm() / expected.norm()).item()
    print("sparse kernel against SDPA, relative error", error, flush=True)
    if error > 1e-2:
        raise RuntimeError("the sparse kernel is wrong")


def main() -> None:
    """Run one bed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bed", choices=("R", "N"), required=True)
    parser.add_argument("--configs", type=Path, required=True, help="one method a line; # begins a comment")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="no new measurement after that")
    parser.add_argument("--use", choices=("tune", "test"), default="tune", help="texts (bed R)")
    parser.add_argument("--then-test", type=Path, help="configurations to run on the test texts afterwards (bed R)")
    parser.add_argument(
        "--retriever", type=Path, default=Path(__file__).parents[1] / "retriever" / "model", help="folder (bed N)"
    )
    parser.add_argument("--tokens", type=int, default=texts.NUM_TOKENS, help="of each text, a multiple of 128 (bed R)")
    parser.add_argument("--texts", type=int, default=99, help="only the first ones (bed R)")
    parser.add_argument("--yarn", type=float, default=2.0)
    parser.add_argument("--gguf", type=Path, default=Path("/tmp") / smollm.FILE_NAME)
    parser.add_argument("--prompts", type=int, default=24, help="per task (bed N)")
    parser.add_argument("--tasks", default=",".join(f"{length}/{needles}" for length, needles in TASKS), help="bed N")
    parser.add_argument("--limit", type=int, default=10**6, help="only the first configurations")
    options = parser.parse_args()
    begun = time.monotonic()
    stop = begun + 60 * options.minutes
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cuda":
        check_kernel(device)
    configs = read_configs(options.configs)[: options.limit]
    log = Log(options.out)
    if options.bed == "R":
        model = smollm.load(options.gguf, options.yarn, dtype)
        model = prepare(model.to(device))
        print(f"model ready after {time.monotonic() - begun:.1f} s", flush=True)
        passes = [(options.use, configs)] + ([("test", read_configs(options.then_test))] if options.then_test else [])
        for use, listed in passes:
            chosen = list(texts.load(use).items())[: options.texts]
            on_device = {name: torch.tensor(ids[: options.tokens], device=device) for name, ids in chosen}
            measure_texts(model, listed, on_device, log, stop, use)
            print(f"{use} texts: {time.monotonic() - begun:.0f} s, {len(listed)} configurations", flush=True)
    else:
        model = prepare(AutoModelForCausalLM.from_pretrained(options.retriever, dtype=dtype).to(device).eval())
        print(f"model ready after {time.monotonic() - begun:.1f} s", flush=True)
        tasks = tuple(tuple(map(int, task.split("/"))) for task in options.tasks.split(","))
        measure_needles(model, [NO_METHOD, *configs], tasks, options.prompts, log, stop)
    print(f"bed {options.bed}: {time.monotonic() - begun:.0f} s, {len(configs)} configurations", flush=True)


if __name__ == "__main__":
    main()
