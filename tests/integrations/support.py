"""Run a cell of the support table; ``python -m tests.integrations.support`` runs every cell and writes the table."""

import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from flexmask.integrations.huggingface import PrefillRun, sparse_prefill
from tests.integrations.cells import ALL_CELLS, CHOICES, Cell, refusal, run_cell
from tests.integrations.common import KEEP_ALL
from tests.integrations.families import FAMILIES
from tests.integrations.written_out import written_out
from tests.repository import ROOT

PATH = ROOT / "integrations" / "huggingface" / "SUPPORT.md"
_, CACHES, PADDINGS, PREFILLS, CALLS = CHOICES


class Result(NamedTuple):
    """A cell's refusal, or the largest differences of its logits."""

    refused: str | None = None
    at_gamma_one: float = 0.0
    under_its_masks: float = 0.0


TOLERANCE = 1e-4
SPARSE: dict[str, Any] = {**KEEP_ALL, "gamma": 0.4, "tau": 0.13}
# few blocks lie in a window
SPARSE_IN_WINDOWS: dict[str, Any] = {"tau": 0.17}


@functools.cache
def model_of(family: str) -> Any:
    model = FAMILIES[family].make()
    model.set_attn_implementation(FAMILIES[family].dense)
    return model


def run_dense(cell: Cell) -> tuple[Tensor, Tensor | None]:
    return run_cell(model_of(cell.family), cell)


def run_sparse(cell: Cell, **settings: Any) -> tuple[Tensor, Tensor | None, PrefillRun]:
    model = model_of(cell.family)
    with sparse_prefill(model, **settings, collect_masks=True) as run:
        return *run_cell(model, cell), run


def difference(logits: Tensor, expected: Tensor) -> float:
    assert logits.shape == expected.shape
    return float((logits - expected).abs().max())


def result_of(cell: Cell) -> Result:
    """Assert that a cell is refused, or equals dense attention at gamma 1, and attention under its masks below."""
    refused = refusal(cell)
    if refused:
        reason, error, message = refused
        with pytest.raises(error, match=message):
            run_dense(cell)
        return Result(reason)
    dense, chosen = run_dense(cell)
    logits, tokens, run = run_sparse(cell, **KEEP_ALL)
    at_gamma_one = difference(logits, dense)
    assert at_gamma_one < TOLERANCE
    assert tokens is None or (chosen is not None and torch.equal(tokens, chosen))
    assert not any(stats.dense for calls in run.stats.values() for stats in calls)

    layers = dict.fromkeys(FAMILIES[cell.family].sliding_layers(), SPARSE_IN_WINDOWS)
    logits, tokens, run = run_sparse(cell, **SPARSE, layers=layers)
    every = [stats for calls in run.stats.values() for stats in calls]
    query_aware = torch.stack([stats.is_query_aware for stats in every])
    assert torch.stack([stats.density for stats in every]).mean() < 0.7
    assert query_aware.any()
    assert not query_aware.all()
    assert difference(logits, dense) > 100 * TOLERANCE
    with written_out(model_of(cell.family), run.masks):
        expected, chosen = run_cell(model_of(cell.family), cell)
    under_its_masks = difference(logits, expected)
    assert under_its_masks < TOLERANCE
    assert tokens is None or (chosen is not None and torch.equal(tokens, chosen))
    return Result(None, at_gamma_one, under_its_masks)


def support_table(results: Mapping[Cell, Result]) -> str:
    """The page as it is, with these results in its first paragraph and in its table."""
    kinds, ways = list(itertools.product(CACHES, PADDINGS)), list(itertools.product(PREFILLS, CALLS))
    reasons: list[str] = []
    rows = []
    for name, family in FAMILIES.items():
        texts = [_text([results[Cell(name, *kind, *way)] for way in ways], reasons) for kind in kinds]
        mine = [result for cell, result in results.items() if cell.family == name]
        largest = [f"{max(each):.0e}" for each in ([r.at_gamma_one for r in mine], [r.under_its_masks for r in mine])]
        title = f"{name}: {family.note}" if family.note else name
        rows.append(" | ".join([f"| {title}", *texts, *largest]) + " |\n")
    if reasons:
        rows += ["\n", *(f"{number}. {reason}\n" for number, reason in enumerate(reasons, 1))]
    releases = f"with transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}, in"
    counts = f"float32 on a CPU: {len(results)} cells, {sum(r.refused is not None for r in results.values())} of them refused"
    text = PATH.read_text(encoding="utf-8")
    before = re.sub(r"with transformers .*? of them refused", f"{releases}\n{counts}", text, count=1, flags=re.DOTALL)
    head, line, _ = before.partition("| --- |\n")
    return head + line + "".join(rows)


def _text(ways: list[Result], reasons: list[str]) -> str:
    refused = [result.refused for result in ways if result.refused is not None]
    reasons += [reason for reason in dict.fromkeys(refused) if reason not in reasons]
    if not refused:
        return "ok"
    notes = ", ".join(f"({reasons.index(reason) + 1})" for reason in dict.fromkeys(refused))
    return f"{len(ways) - len(refused)} ok, {len(refused)} refused {notes}"


if __name__ == "__main__":
    PATH.write_text(support_table({cell: result_of(cell) for cell in ALL_CELLS}), encoding="utf-8")
