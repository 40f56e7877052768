"""Try every causal-LM type of the installed transformers, and write integrations/huggingface/MODELS.md; run by hand.

A tiny random model of each type, in a process of its own, runs a prompt dense, at gamma 1, which must give the same logits, and
at a lower gamma, which must not::

    python -m tests.integrations.sweep run --results sweep-5.23.jsonl      # resumes; half an hour
    python -m tests.integrations.sweep table sweep-*.jsonl                 # one file per release, the newest first

Nothing is compiled: attention is written out under the block lists and the mask_mod.
"""

import argparse
import json
import logging
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flexmask.attend
import flexmask.integrations.huggingface as flexmask_hf
from flexmask.base.inputs import AttentionInputs
from tests.expected import masked_attention, pairs_under
from tests.integrations.sweep_configs import attempts, causal_types
from tests.repository import ROOT

PATH = ROOT / "integrations" / "huggingface" / "MODELS.md"

MEANINGS = {
    "served": "logits at gamma 1 are those of dense attention, and a lower gamma makes attention sparse",
    "dense": "runs, right, and dense; the note says why",
    "refused": "raises when the block opens or in the forward, with the message below",
    "untouched": "no layer calls flexmask: the model runs as without the block, and a warning says so",
    "wrong": "logits at gamma 1 are not those of dense attention",
    "fails": "an error that is not a refusal of ours",
    "cannot be built here": "its default configuration could not be shrunk to a tiny model: unknown",
}
TEXT = """
Run: {run}. `python -m tests.integrations.sweep` writes this file.

| | {heads} | |
{lines}|---|
{totals}

## By type

`-`: not in this release. Numbers refer to the notes below.

| {heads} | types |
{lines}|
{rows}

## Notes

{notes}
"""
Results = tuple[dict[str, str], dict[str, dict[str, str]]]
BATCH, LENGTH = 2, 160
SECONDS_EACH = 180
KEEP_ALL: dict[str, Any] = {"method": "flexprefill", "gamma": 1.0, "block_size": 16, "min_budget": 0, "dense_below": 0}
SPARSE: dict[str, Any] = {**KEEP_ALL, "gamma": 0.5, "tau": 0.12}
# of the largest logit
TOLERANCE, SENSITIVE = 1e-4, 1e-3


def written_out(inputs: AttentionInputs, mask: BlockMask, *rest: Any) -> tuple[Tensor, None]:
    """FlexAttention in float64."""
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    pairs = pairs_under(mask, query.shape[2], key.shape[2]).expand(*query.shape[:2], -1, -1)
    out, _ = masked_attention(query, key, value, pairs, inputs.scale, inputs.softcap, inputs.sinks)
    return out.to(query.dtype), None


def try_type(name: str) -> dict[str, str]:
    """The verdict on one type."""
    model, tokens, dense, errors = None, torch.randint(3, 96, (BATCH, LENGTH)), torch.empty(0), []
    for make in attempts(name):
        try:
            torch.manual_seed(0)
            model = make()
            dense = model(tokens).logits
            break
        except Exception as error:
            model = None
            errors.append(one_line(error))
    if model is None:
        return {"verdict": "cannot be built here", "note": errors[0] if errors else "no configuration"}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with flexmask_hf.sparse_prefill(model, **KEEP_ALL) as run:
                whole = model(tokens).logits
            if any("did not reach" in str(each.message) for each in caught):
                return {"verdict": "untouched", "note": ""}
            with flexmask_hf.sparse_prefill(model, **SPARSE) as sparse_run:
                sparse = model(tokens).logits
    except Exception as error:
        ours = "flexmask" in str(error) or str(error).startswith("model must go through")
        return {"verdict": "refused" if ours else "fails", "note": one_line(error), "trace": traceback.format_exc()[-1500:]}
    largest = max(1.0, float(dense.abs().max()))
    off, moved = (float((each - dense).abs().max()) / largest for each in (whole, sparse))
    if not off < TOLERANCE:
        return {"verdict": "wrong", "note": f"logits at gamma 1 are off by {off:.1e} of the largest"}
    reasons = {reason for layer in run.reasons.values() for reason in layer if reason is not None}
    stats = [each for calls in sparse_run.stats.values() for each in calls]
    if all(each.dense for each in stats):
        return {"verdict": "dense", "note": "; ".join(sorted(reasons))}
    if not moved > SENSITIVE or min(float(each.density.min()) for each in stats) == 1:
        return {"verdict": "served", "note": f"shown less well: the sparse logits move by {moved:.0e} of the largest"}
    return {"verdict": "served", "note": "; ".join(sorted(f"dense: {reason}" for reason in reasons))}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def keep(results: Path, found: dict[str, Any]) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def read(results: Path) -> Results:
    """The heading of a file of results, and the last of each type."""
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return lines[0], {line["type"]: line for line in lines[1:]}


def run_all(results: Path, only: list[str]) -> None:
    """Try the types that have no result yet."""
    if not results.exists():
        date = time.strftime("%Y-%m-%d", time.gmtime())
        keep(results, {"transformers": transformers.__version__, "torch": torch.__version__, "date": date})
    for name in only or causal_types():
        if name in read(results)[1]:
            continue
        command = [sys.executable, "-m", "tests.integrations.sweep", "try", name]
        try:
            printed = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_EACH, check=True).stdout
            found = json.loads(printed.splitlines()[-1])
        except subprocess.TimeoutExpired:
            found = {"verdict": "cannot be built here", "note": f"took over {SECONDS_EACH} s"}
        except subprocess.CalledProcessError:
            found = {"verdict": "cannot be built here", "note": "ended the process (memory)"}
        keep(results, {"type": name, **found})
        print(f"{name}: {found['verdict']}", flush=True)


def table(releases: list[Results]) -> str:
    """The page from the heading and results of each release; its first paragraph stays."""
    notes: dict[str, int] = {}
    types: dict[tuple[str, ...], list[str]] = {}
    for name in sorted({name for _, found in releases for name in found}):
        cells = tuple(_cell(found.get(name), notes) for _, found in releases)
        types.setdefault(cells, []).append(f"`{name}`")
    rows = [f"| {' | '.join(cells)} | {', '.join(each)} |" for cells, each in sorted(types.items(), key=_by_verdict)]
    heads = [f"transformers {heading['transformers']}" for heading, _ in releases]
    counts = [Counter(result["verdict"] for result in found.values()) for _, found in releases]
    numbers = {verdict: [str(count[verdict]) for count in counts] for verdict in MEANINGS}
    totals = [" | ".join([f"| {verdict}", *own, MEANINGS[verdict]]) + " |" for verdict, own in numbers.items() if {*own} != {"0"}]
    run = "; ".join(
        f"transformers {h['transformers']} on torch {h['torch']}, {len(found)} types, {h['date']}" for h, found in releases
    )
    return PATH.read_text(encoding="utf-8").partition("\nRun: ")[0] + TEXT.format(
        run=run,
        heads=" | ".join(heads),
        lines="|---" * (len(heads) + 1),
        totals="\n".join(totals),
        rows="\n".join(rows),
        notes="\n".join(f"{number}. {note}" for note, number in notes.items()),
    )


def _by_verdict(row: tuple[tuple[str, ...], list[str]]) -> list[int]:
    """Rows in the order of `MEANINGS`, by the newest release that has the types."""
    order = [*MEANINGS, "-"]
    return [order.index(cell.partition(" (")[0]) for cell in row[0]]


def _cell(result: dict[str, str] | None, notes: dict[str, int]) -> str:
    if result is None:
        return "-"
    if result["verdict"] == "cannot be built here":
        return result["verdict"]
    note = re.sub(r"; got \w+, which does not$|^\w+Error: (?=flexmask)|^MaskNotServed: ", "", result.get("note", ""))
    note = re.sub(r"does not serve \w+(?:LM|Generation|Model), ", "does not serve ", note)
    note = note.replace("|", "\\|").replace("<", "&lt;")
    return f"{result['verdict']} ({notes.setdefault(note, len(notes) + 1)})" if note else result["verdict"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("--results", type=Path, required=True)
    command.add_argument("--types", nargs="*", default=[])
    commands.add_parser("try").add_argument("type")
    commands.add_parser("table").add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_all(arguments.results, arguments.types)
    elif arguments.command == "table":
        PATH.write_text(table([read(path) for path in arguments.results]), encoding="utf-8")
    else:
        torch.set_num_threads(1)
        setattr(flexmask.attend, "run_flex_attention", written_out)  # noqa: B010
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        with torch.no_grad():
            print(json.dumps(try_type(arguments.type)))


if __name__ == "__main__":
    main()
