"""The table of integrations/huggingface/MODELS.md, from the results of sweep.py."""

import re
from collections import Counter

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
TEXT = """\
# Models

Every model type of `AutoModelForCausalLM`, run as one tiny random model on a CPU in float32: 2 prompts of 160 tokens without
padding, blocks of 16, the default cache, `dense_below=0`, attention written out in PyTorch over the chosen blocks. Trained
weights, other options of a type, images and sound were not run. [SUPPORT.md](SUPPORT.md) has caches, padding and generation
through the compiled kernels, for fewer families.

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


def table(releases: list[Results]) -> str:
    """The whole document, from the heading and results of each release."""
    notes: dict[str, int] = {}
    types: dict[tuple[str, ...], list[str]] = {}
    for name in sorted({name for _, found in releases for name in found}):
        cells = tuple(_cell(found.get(name), notes) for _, found in releases)
        types.setdefault(cells, []).append(f"`{name}`")
    rows = [f"| {' | '.join(cells)} | {', '.join(each)} |" for cells, each in sorted(types.items(), key=_by_verdict)]
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
    note = (
        re.sub(r"does not serve \w+(?:LM|Generation|Model), ", "does not serve ", note).replace("|", "\\|").replace("<", "&lt;")
    )
    if not note:
        return result["verdict"]
    return f"{result['verdict']} ({notes.setdefault(note, len(notes) + 1)})"
