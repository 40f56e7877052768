"""Compare variants on one prompt: they take turns with dense attention, to which their ratios refer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.measure import methods
from bench.measure.clock import ROUNDS, eager_and_graph_times, eager_times, text_of
from bench.measure.results import Row
from bench.measure.resumable import ResumableRun
from bench.measure.variants import DENSE_BASELINE, Variant
from bench.prompts.prompt import Prompt
from bench.prompts.structured import Tensors


def compare(run: ResumableRun, prompt: Prompt, variants: Sequence[Variant], rounds: int = ROUNDS, graphs: bool = True) -> None:
    """Measure those variants whose rows are missing, in turns with dense attention, and save a row for each."""
    by_key = {_identity(variant.key(prompt)): variant for variant in variants}

    def work(missing: list[Row]) -> None:
        tensors = prompt.tensors(run.results)
        wanted = [by_key[_identity(row)] for row in missing]
        baseline = next((variant for variant in wanted if variant.method == DENSE_BASELINE.method), DENSE_BASELINE)
        with torch.no_grad():
            ready, times = _warmed(dict.fromkeys([baseline, *wanted]), tensors)
            times |= eager_and_graph_times(ready, rounds) if graphs else eager_times(ready, rounds)
        ready.clear()
        dense = times[baseline]
        for variant, row in zip(wanted, missing, strict=True):
            fields = variant.density(prompt, run.results)
            run.add(row | shape_fields(tensors) | fields | times[variant] | _ratios(times[variant], dense))

    names = ", ".join(dict.fromkeys(variant.method for variant in variants))
    keys = [variant.key(prompt) for variant in variants]
    run.step(f"{prompt.input}, {prompt.tokens:,} tokens, {names}", keys, work)


def shape_fields(tensors: Tensors) -> Row:
    """Return the shape as fields of a row."""
    query, key, _ = tensors
    return {"num_heads": query.shape[1], "num_kv_heads": key.shape[1], "head_dim": query.shape[3], "dtype": str(query.dtype)[6:]}


def _identity(row: Row) -> tuple[Any, ...]:
    """The part of a row's key that differs between variants on one prompt."""
    return row["method"], row["gamma"], row["min_budget"]


def _warmed(
    variants: dict[Variant, None], tensors: Tensors
) -> tuple[dict[Variant, Callable[[], Any]], dict[Variant, dict[str, Any]]]:
    """Compile each variant and return the calls to time, and an error for each that failed."""
    ready: dict[Variant, Callable[[], Any]] = {}
    failed: dict[Variant, dict[str, Any]] = {}
    for variant in variants:
        try:
            methods.warm_up(variant.make, tensors)
            ready[variant] = variant.make(tensors)
        except Exception as error:
            failed[variant] = {"error": text_of(error)}
    return ready, failed


def _ratios(times: dict[str, Any], dense: dict[str, Any]) -> Row:
    """Dense attention's times in the same run, and this variant's speed relative to them."""
    fields: Row = {}
    for clock, dense_name, ratio in (("wall_ms", "dense_ms", "ratio"), ("graph_ms", "dense_graph_ms", "graph_ratio")):
        if clock in dense:
            fields[dense_name] = dense[clock]
            if clock in times:
                fields[ratio] = dense[clock] / times[clock]
    return fields
