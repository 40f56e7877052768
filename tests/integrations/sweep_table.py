"""The table of integrations/MODELS.md, made of the results of sweep.py."""

from __future__ import annotations

import re
from collections import Counter

from tests.repository import ROOT

PATH = ROOT / "integrations" / "MODELS.md"

MEANINGS = {
    "served": "logits at gamma 1 are those of dense attention, and a lower gamma makes attention sparse",
    "dense": "runs, right, and dense; the note says why",
    "refused": "raises when the block opens or in the forward, with the message below",
    "untouched": "FlexPrefill does not reach its layers: it runs as without the block, which warns",
    "wrong": "logits at gamma 1 are not those of dense attention",
    "fails": "an error that is not a refusal of ours",
    "cannot be built here": "no tiny model of it could be made by shrinking its default configuration, so that nothing is known",
}
TEXT = """\
# Models

Every type that `AutoModelForCausalLM` knows, tried with one tiny random model on a CPU in float32: a prompt of 2 x 160 tokens
without padding, blocks of 16, the default cache, `dense_below=0`. Attention was written out in PyTorch over the chosen blocks
instead of compiled. Trained weights, other options of a type, images and sound were not tried. [SUPPORT.md](SUPPORT.md) has
caches, padding and generation through the compiled kernels, for fewer families.

Run: {run}.
Other releases were not swept.
Written by `python -m tests.integrations.sweep`, not by hand.

| | {heads} | |
{lines}|---|
{totals}

## By type

`-`: the release does not have the type. Numbers stand for the notes below.

| type | {heads} |
{lines}|
{rows}

## Notes

{notes}
"""
Results = tuple[dict[str, str], dict[str, dict[str, str]]]


def table(releases: list[Results]) -> str:
    """The whole document, from the heading and the results by type of each release."""
    names = sorted({name for _, found in releases for name in found})
    notes: dict[str, int] = {}
    rows = []
    for name in names:
        cells = [_cell(found.get(name), notes) for _, found in releases]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    heads = [f"transformers {heading['transformers']}" for heading, _ in releases]
    counts = [Counter(result["verdict"] for result in found.values()) for _, found in releases]
    totals = [f"| {verdict} | " + " | ".join(str(count[verdict]) for count in counts) + f" | {MEANINGS[verdict]} |"
              for verdict in MEANINGS if any(count[verdict] for count in counts)]  # fmt: skip
    run = "; ".join(
        f"transformers {h['transformers']} on torch {h['torch']}, {len(found)} types, {h['date']}" for h, found in releases
    )
    return TEXT.format(
        run=run,
        heads=" | ".join(heads),
        lines="|---" * (len(heads) + 1),
        totals="\n".join(totals),
        rows="\n".join(rows),
        notes="\n".join(f"{number}. {note}" for note, number in notes.items()),
    )


def _cell(result: dict[str, str] | None, notes: dict[str, int]) -> str:
    if result is None:
        return "-"
    # one note for all models of which the same is said
    note = re.sub(r"; got \w+, which does not$|^\w+Error: (?=flexprefill)|^MaskNotServed: ", "", result.get("note", ""))
    note = (
        re.sub(r"does not serve \w+(?:LM|Generation|Model), ", "does not serve ", note).replace("|", "\\|").replace("<", "&lt;")
    )
    if not note:
        return result["verdict"]
    return f"{result['verdict']} ({notes.setdefault(note, len(notes) + 1)})"
