"""Accuracy with dense attention: ``python -m bench.ruler_model.evaluate --out FILE.jsonl``.

Writes a line per task and length, resumes, and prints the table. An answer is right if all its tokens are; ``parts`` is the
share of right tokens, RULER's score.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.decoding import decode, prefill
from bench.intervals import wilson
from bench.rows import append_row, read_rows
from bench.ruler_model.prompts import TASKS, make_prompts

BATCH_TOKENS = 131072
MODEL = Path(__file__).parent / "model"
FIRST_SEED = 50_000


def greedy(model: PreTrainedModel, token_ids: Tensor, num_answer_tokens: int) -> Tensor:
    """Greedy answers to prompts (count, num_tokens), (count, num_answer_tokens) int64."""
    return decode(model, *prefill(model, token_ids), num_answer_tokens)


def measure(model: PreTrainedModel, task: str, num_tokens: int, count: int) -> dict[str, Any]:
    """Figures of `count` prompts of one task and length."""
    rows, right, parts, tokens = max(1, BATCH_TOKENS // num_tokens), 0, 0, 0
    start = time.monotonic()
    for done in range(0, count, rows):
        prompts = make_prompts(task, num_tokens, min(rows, count - done), FIRST_SEED + done, model.device)
        answer_tokens = prompts.answers.shape[1]
        found = prompts.parts_right(greedy(model, prompts.token_ids, answer_tokens))
        right += int((found == answer_tokens).sum())
        parts += int(found.sum())
        tokens += prompts.answers.numel()
    interval = [round(end, 4) for end in wilson(right, count)]
    seconds = round(time.monotonic() - start, 2)
    return {"right": right, "prompts": count, "interval": interval, "parts": round(parts / tokens, 4), "seconds": seconds}


def rows_of(path: Path | None) -> dict[tuple[str, int], dict[str, Any]]:
    """Rows of a file by task and length."""
    rows = read_rows(path) if path else []
    return {(row["task"], row["tokens"]): row for row in rows if "task" in row}


def table(found: dict[tuple[str, int], dict[str, Any]]) -> list[str]:
    """Lines of the table: percent of right answers with interval; percent of right tokens."""
    lengths = sorted({tokens for _, tokens in found})
    lines = ["| task | " + " | ".join(f"{tokens:,}" for tokens in lengths) + " |", "| --- " * (len(lengths) + 1) + "|"]
    for task in TASKS:
        cells = []
        for row in (found.get((task, tokens)) for tokens in lengths):
            low, high = row["interval"] if row else (0.0, 0.0)
            whole = f"{100 * row['right'] / row['prompts']:.1f} [{100 * low:.0f}, {100 * high:.0f}]" if row else "-"
            cells.append(f"{whole}; {100 * row['parts']:.1f}" if row else whole)
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model")
    parser.add_argument("--lengths", default="4096,8192,16384,32768,65536", help="prompt lengths in tokens")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--prompts", type=int, default=128, help="per task and length")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new measurement after that")
    parser.add_argument("--out", type=Path, help="JSON lines are added to it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    stop = time.monotonic() + 60 * options.minutes
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    found = rows_of(options.out)
    for num_tokens in (int(length) for length in options.lengths.split(",")):
        for task in options.tasks.split(","):
            if (task, num_tokens) in found or time.monotonic() > stop:
                continue
            row = {"task": task, "tokens": num_tokens} | measure(model, task, num_tokens, options.prompts)
            found[task, num_tokens] = row
            print(json.dumps(row), flush=True)
            if options.out:
                append_row(options.out, row)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
