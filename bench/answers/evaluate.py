"""Answers behind each selection: ``python -m bench.answers run --model FOLDER --prompts FILE --settings FILE --out ROWS``.

A prompt is prefilled with a setting's selection, whole or in chunks, and the right answer is read densely behind it, as decoding
would. A row has:

- `logp`, the log-probability of the whole right answer, in nats. Its difference from dense on the same prompt (*dlp*) needs about
  a tenth of the prompts that a score needs: a score changes where an answer tips over, a log-probability in every prompt.
- `exact`, true if each token of the answer is the most probable one behind those before it. Greedy decoding then gives exactly
  this answer, and only then. `parts` is the share of the answer's parts of which that holds.
- `score` with ``--greedy``: the share of the parts that greedy decoding names, which is RULER's score.
- `density`, the kept share of the causal blocks, mean over layers, heads and chunks; dense layers count as 1.
- `kept_last` and `kept_rows` with ``--kept``: the kept share of the key blocks that hold the answer's evidence, in the prompt's
  last row of blocks and in all rows that see them, mean over layers and heads.

Settings are a list of JSON objects: `name` and the fields of `flexmask.PrefillSettings`, with ``"method_file":
"FILE.py:function"`` for a method of your own. Dense is always measured, once a prompt. The same command resumes.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import method_file
from bench.answers.evidence import Kept, token_spans
from bench.answers.prompts import read_prompts
from bench.decoding import CACHE, decode, prefill
from bench.rows import Row, append_row, read_rows
from flexmask import sparse_prefill
from flexmask.settings import PrefillSettings

DENSE = {"name": "dense"}
PLACE = ("task", "length", "seed", "index")


def prefill_settings(setting: Row) -> PrefillSettings:
    """The settings of an object of the settings file; dense attention of the same kernels without a method or options."""
    fields = {name: value for name, value in setting.items() if name != "name"}
    if not fields:
        return PrefillSettings(dense_below=2**40)
    file = fields.pop("method_file", None)
    if file is None:
        return PrefillSettings.from_dict(fields)
    path, _, function = file.rpartition(":")
    if not path or not function:
        raise ValueError(f"method_file must be FILE.py:function; got {file}")
    # JSON has no integer keys
    fields["layers"] = {int(layer): options for layer, options in fields.get("layers", {}).items()}
    return PrefillSettings(method=getattr(method_file.load(path), function), **fields)


def read_settings(path: Path) -> list[Row]:
    """Settings with dense first; ValueError for names that occur twice."""
    given = [DENSE if each == "dense" else each for each in json.loads(path.read_text(encoding="utf-8"))]
    names = [each["name"] for each in given]
    if len(set(names)) < len(names):
        raise ValueError(f"settings must have different names; got {', '.join(names)}")
    return [DENSE, *(each for each in given if each["name"] != "dense")]


def with_float_logits(model: Any) -> Any:
    """The model with an output layer in float32: steps of bfloat16 are an eighth of a nat."""

    def in_float(layer: Any, arguments: tuple[Tensor], output: Tensor) -> Tensor:
        bias = None if layer.bias is None else layer.bias.float()
        return torch.nn.functional.linear(arguments[0].float(), layer.weight.float(), bias)

    model.get_output_embeddings().register_forward_hook(in_float)
    return model


@torch.no_grad()
def read_answer(model: Any, logits: Tensor, cache: Any, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each answer token (1, count) behind a prefill, and whether it is the most probable: (count,) each."""
    if answer.shape[1] > 1:
        following = model(input_ids=answer[:, :-1], **{CACHE: cache}).logits
        logits = torch.cat([logits[:, None], following], 1)[0]
    found = logits.log_softmax(-1)
    return found.gather(1, answer[0, :, None])[:, 0], found.argmax(-1) == answer[0]


def parts_right(tokenizer: Any, row: Row, right: Tensor) -> float:
    """Share of the answer's parts of which every token is right."""
    text, found, at = row["answer"], [], 0
    for part in row["answers"]:
        at = text.index(part, at)
        first, end = token_spans(tokenizer, text, [(at, at + len(part))])[0]
        found.append(bool(right[first:end].all()))
        at += len(part)
    return sum(found) / len(found)


def evaluate(model: Any, tokenizer: Any, row: Row, setting: Row, options: argparse.Namespace) -> Row:
    """Measure one setting on one prompt."""
    ids, answer = (
        tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)
        for text in (row["prompt"], row["answer"])
    )
    start = time.monotonic()
    wants_kept = options.kept and row["evidence"] and setting is not DENSE
    settings, prompt_len = prefill_settings(setting), ids.shape[1]
    with sparse_prefill(model, settings=settings, collect_masks=wants_kept, max_calls=None, prompt_len=prompt_len) as run:
        logits, cache = prefill(model, ids, options.chunk)
    log_probs, right = read_answer(model, logits, cache, answer)
    found: Row = {
        "logp": float(log_probs.sum()),
        "exact": bool(right.all()),
        "parts": parts_right(tokenizer, row, right.cpu()),
        "density": run.summary().density,
    }
    if options.greedy:
        if answer.shape[1] > 1:
            cache.crop(1 - answer.shape[1])
        text = tokenizer.decode(decode(model, logits, cache, row["new_tokens"])[0], skip_special_tokens=True)
        found["score"] = sum(part.lower() in text.lower() for part in row["answers"]) / len(row["answers"])
        found["text"] = text
    if wants_kept:
        kept = Kept(token_spans(tokenizer, row["prompt"], row["evidence"]), run.settings.block_size)
        found |= kept.shares(run.masks, ids.shape[1], options.chunk or ids.shape[1])
    return {**found, "tokens": ids.shape[1], "answer_tokens": answer.shape[1], "seconds": round(time.monotonic() - start, 3)}


def measure(model: Any, tokenizer: Any, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Add a row for each prompt and setting that the file lacks."""
    settings, chunk = read_settings(options.settings), options.chunk
    known: dict[Any, Any] = {}
    for row in read_rows(options.out):
        known[tuple(row[name] for name in (*PLACE, "chunk", "setting"))] = row["options"]
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else "CPU"
    same = {"chunk": chunk, "model": options.name or options.model.name, "device": device, "torch": torch.__version__}
    for row in rows:
        for setting in settings:
            place = {name: row[name] for name in PLACE}
            key = (*place.values(), chunk, setting["name"])
            if key in known:
                if known[key] != setting:
                    raise ValueError(f"{options.out} has other options of {setting['name']}: {known[key]}")
                continue
            found = evaluate(model, tokenizer, row, setting, options)
            append_row(options.out, {**place, "setting": setting["name"], **found, "options": setting, **same})
        print(f"{row['task']} {row['index']}", flush=True)


def chosen(options: argparse.Namespace) -> list[Row]:
    """The prompts of the command: of some tasks, the first of each, every n-th of those."""
    rows = read_prompts(options.prompts)
    wanted = options.tasks.split(",") if options.tasks else {row["task"]: 0 for row in rows}
    first: list[Row] = []
    for task in wanted:
        first += [row for row in rows if row["task"] == task][: options.limit]
    # tasks in turn, so that an early stop has some of each
    first.sort(key=lambda row: row["index"])
    share, shares = (int(part) for part in options.shard.split("/"))
    return first[share::shares]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal model")
    parser.add_argument("--name", help="the model's in the rows (the folder's)")
    parser.add_argument("--prompts", type=Path, required=True, help="file of `prompts`")
    parser.add_argument("--settings", type=Path, required=True, help="JSON list of settings")
    parser.add_argument("--out", type=Path, required=True, help="file that rows are added to")
    parser.add_argument("--chunk", type=int, help="prefill in chunks of so many tokens")
    parser.add_argument("--tasks", help="some of the file's, by name with commas")
    parser.add_argument("--limit", type=int, help="prompts of each task")
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th prompt from the I-th (0/1)")
    parser.add_argument("--greedy", action="store_true", help="decode an answer too, for RULER's score")
    parser.add_argument("--kept", action="store_true", help="the kept share of the evidence's blocks")


def main(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    logging.getLogger("flexmask").setLevel(logging.ERROR)  # it warns of each dense prefill
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    measure(with_float_logits(model.to(device).eval()), AutoTokenizer.from_pretrained(options.model), chosen(options), options)
