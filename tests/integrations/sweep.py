"""Try every causal-LM type of the installed transformers, and write integrations/huggingface/MODELS.md; run by hand.

A tiny random model of each type, in a process of its own, runs a prompt dense, at gamma 1, which must give the same logits, and
at a lower gamma, which must not::

    python -m tests.integrations.sweep sweep-5.24.jsonl sweep-5.23.jsonl

The first file is this release's: types that it lacks are tried (half an hour for all). The others are those of other releases.
Nothing is compiled: attention is written out under the block lists and the mask_mod.
"""

import json
import logging
import multiprocessing
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import flexmask.integrations.huggingface as flexmask_hf
from bench.tables import markdown_table
from flexmask.base.inputs import AttentionInputs
from tests.expected import masked_attention, pairs_under
from tests.integrations import common
from tests.integrations.sweep_configs import attempts
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
BATCH, LENGTH = 2, 160
SECONDS_EACH = 180
KEEP_ALL = {**common.KEEP_ALL, "block_size": 16}
SPARSE = {**KEEP_ALL, "gamma": 0.5, "tau": 0.12}
# of the largest logit
TOLERANCE, SENSITIVE = 1e-4, 1e-3


def written_out(inputs: AttentionInputs, mask: BlockMask, *rest: Any) -> tuple[Tensor, None]:
    """FlexAttention in float64."""
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    pairs = pairs_under(mask, query.shape[2], key.shape[2]).expand(*query.shape[:2], -1, -1)
    out, _ = masked_attention(query, key, value, pairs, inputs.scale, inputs.softcap, inputs.sinks)
    return out.to(query.dtype), None


def try_type(name: str) -> tuple[str, str]:
    """The verdict on one type, and a note."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    with torch.no_grad(), patch("flexmask.attend.run_flex_attention", written_out), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
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
            return "cannot be built here", errors[0]
        try:
            with flexmask_hf.sparse_prefill(model, **KEEP_ALL) as run:
                whole = model(tokens).logits
            if any("did not reach" in str(each.message) for each in told):
                return "untouched", ""
            with flexmask_hf.sparse_prefill(model, **SPARSE) as sparse_run:
                sparse = model(tokens).logits
        except Exception as error:
            ours = "flexmask" in str(error) or str(error).startswith("model must go through")
            return "refused" if ours else "fails", one_line(error)
    off, moved = (float((each - dense).abs().max() / dense.abs().max().clamp(min=1)) for each in (whole, sparse))
    if not off < TOLERANCE:
        return "wrong", f"logits at gamma 1 are off by {off:.1e} of the largest"
    reasons = sorted({reason for layer in run.reasons.values() for reason in layer if reason is not None})
    stats = [each for calls in sparse_run.stats.values() for each in calls]
    if all(each.dense for each in stats):
        return "dense", "; ".join(reasons)
    if not moved > SENSITIVE or min(float(each.density.min()) for each in stats) == 1:
        return "served", f"shown less well: the sparse logits move by {moved:.0e} of the largest"
    return "served", "; ".join(f"dense: {reason}" for reason in reasons)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def complete(results: Path) -> None:
    """Try the types that have no result yet: a line of the file each, after one of the releases."""
    release = [f"transformers {transformers.__version__}", f"torch {torch.__version__}", time.strftime("%Y-%m-%d")]
    with results.open("a+", encoding="utf-8") as file:
        file.seek(0)
        done = {json.loads(line)[0] for line in file}
        for name in ["", *sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]:
            if name in done:
                continue
            with multiprocessing.get_context("spawn").Pool(1) as process:
                try:
                    found = process.apply_async(try_type, [name]).get(SECONDS_EACH) if name else release
                except multiprocessing.TimeoutError:
                    found = "cannot be built here", f"took over {SECONDS_EACH} s, or too much memory"
            file.write(json.dumps([name, *found]) + "\n")
            file.flush()
            print(name, *found)


def page(releases: list[dict[str, list[str]]]) -> str:
    """The page from what each release gave by type; its first paragraph stays."""
    notes: dict[str, int] = {}
    types: dict[tuple[str, ...], list[str]] = {}
    headings = [found.pop("") for found in releases]
    for name in sorted({name for found in releases for name in found}):
        cells = tuple(_cell(notes, *found.get(name, ("-", ""))) for found in releases)
        types.setdefault(cells, []).append(f"`{name}`")
    runs = [f"{h[0]} on {h[1]}, {len(found)} types, {h[2]}" for h, found in zip(headings, releases, strict=True)]
    heads = [heading[0] for heading in headings]
    counts = [Counter(verdict for verdict, _ in found.values()) for found in releases]
    totals = {verdict: [count[verdict] for count in counts] for verdict in MEANINGS}
    sums = [[verdict, *map(str, own), MEANINGS[verdict]] for verdict, own in totals.items() if any(own)]
    # in the order of `MEANINGS`, by the newest release that has the types
    order = [*MEANINGS, "-"]
    rows = sorted(types.items(), key=lambda row: [order.index(cell.partition(" (")[0]) for cell in row[0]])
    lines = [
        f"Run: {'; '.join(runs)}. `python -m tests.integrations.sweep` writes this file.",
        *markdown_table(["", *heads, ""], sums),
        "## By type",
        "",
        "`-`: not in this release. Numbers refer to the notes below.",
        *markdown_table([*heads, "types"], [[*cells, ", ".join(each)] for cells, each in rows]),
        "## Notes",
        "",
        *(f"{number}. {note}" for note, number in notes.items()),
    ]
    return PATH.read_text(encoding="utf-8").partition("Run: ")[0] + "\n".join(lines) + "\n"


def _cell(notes: dict[str, int], verdict: str, note: str) -> str:
    if not note or verdict == "cannot be built here":
        return verdict
    note = re.sub(r"; got \w+, which does not$|^\w+Error: (?=flexmask)|^MaskNotServed: ", "", note)
    note = re.sub(r"does not serve \w+(?:LM|Generation|Model), ", "does not serve ", note)
    note = note.replace("|", "\\|").replace("<", "&lt;")
    return f"{verdict} ({notes.setdefault(note, len(notes) + 1)})"


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[1:]]
    complete(paths[0])
    lines = [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in paths]
    PATH.write_text(page([{name: found for name, *found in each} for each in lines]), encoding="utf-8")
