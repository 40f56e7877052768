"""The committed support table, from the results of all cells."""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch
import transformers

from tests.integrations.cells import BATCH, CHOICES, CHUNK, LENGTH, Cell
from tests.integrations.families import FAMILIES
from tests.repository import ROOT

PATH = ROOT / "integrations" / "huggingface" / "SUPPORT.md"
_, CACHES, PADDINGS, PREFILLS, CALLS = CHOICES


class Result(NamedTuple):
    """A cell's refusal, or the largest differences of its logits."""

    refused: str | None = None
    at_gamma_one: float = 0.0
    under_its_masks: float = 0.0


_TEXT = """# Supported models

Written by `make test-all`, with transformers {transformers} and torch {torch}, in float32 on a CPU: {number} cells, {refused} of
them refused. A cell is a family with a cache, padding, a prefill ({prefills}) and a way to call the model
({calls}); **ok** stands for all prefills and calls.

Each cell runs a tiny random model on {batch} prompts of {length} tokens, in chunks of {chunk} if any, and on a few tokens more.
Logits are compared with those of

- transformers' own attention at gamma 1 (SDPA; eager for Gemma2 and GptOss, which SDPA does not serve);
- attention written out under the chosen masks, at a setting with heads of both patterns and less than 70% of the blocks. They
  also differ by more than 1e-2 from dense attention's.

The last two columns are the largest differences; 1e-4 is allowed. Only logits of real tokens are compared. With right padding
the first token that `generate` returns is meaningless: the tokens are given instead. For a forward, two calls over one cache
stand for a chunked prefill.

| family | {heads} | at gamma 1 | under its masks |
| --- | {lines} | --- | --- |
{rows}
{reasons}"""


def support_table(results: Mapping[Cell, Result]) -> str:
    kinds, ways = list(itertools.product(CACHES, PADDINGS)), list(itertools.product(PREFILLS, CALLS))
    reasons: list[str] = []
    rows = []
    for name, family in FAMILIES.items():
        texts = [_text([results[Cell(name, *kind, *way)] for way in ways], reasons) for kind in kinds]
        mine = [result for cell, result in results.items() if cell.family == name]
        largest = [f"{max(each):.0e}" for each in ([r.at_gamma_one for r in mine], [r.under_its_masks for r in mine])]
        title = f"{name}: {family.note}" if family.note else name
        rows.append(" | ".join([f"| {title}", *texts, *largest]) + " |")
    return _TEXT.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        number=len(results),
        refused=sum(result.refused is not None for result in results.values()),
        prefills=" and ".join(PREFILLS),
        calls=" and ".join(CALLS),
        batch=BATCH,
        length=LENGTH,
        chunk=CHUNK,
        heads=" | ".join(f"{cache.title()}Cache, {padding}" for cache, padding in kinds),
        lines=" | ".join(["---"] * len(kinds)),
        rows="\n".join(rows),
        reasons="".join(f"\n{number}. {reason}" for number, reason in enumerate(reasons, 1)) + "\n" if reasons else "",
    )


def _text(ways: list[Result], reasons: list[str]) -> str:
    refused = [result.refused for result in ways if result.refused is not None]
    reasons += [reason for reason in dict.fromkeys(refused) if reason not in reasons]
    if not refused:
        return "ok"
    notes = ", ".join(f"({reasons.index(reason) + 1})" for reason in dict.fromkeys(refused))
    return f"{len(ways) - len(refused)} ok, {len(refused)} refused {notes}"
