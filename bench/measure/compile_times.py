"""Compile time: first calls at forty lengths, and the gain of code compiled for one length only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters

from bench.measure import methods
from bench.measure.clock import interleaved, seconds, text_of
from bench.prompts.prompt import DEFAULT_FLOOR, SHAPE
from bench.prompts.structured import Tensors, structured_prompt
from flexmask import compilation, search

_LENGTHS = 40
# of the forty, in rising order: those compiled once more, for one length, which takes half a minute each
_SAMPLE = (4, 20, 33, 38)
_AIM = 0.15


def distinct_lengths(shortest: int, longest: int, count: int = _LENGTHS) -> list[int]:
    """Return `count` lengths in geometric progression, shuffled so that long and short ones alternate, as requests come."""
    factor = (longest / shortest) ** (1 / (count - 1))
    lengths = [round(shortest * factor**step) for step in range(count)]
    assert len(set(lengths)) == count
    return [lengths[step * 17 % count] for step in range(count)]


def compile_fields(backend: str, shortest: int, longest: int, gamma: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the whole call's first calls with one backend; return the fields of a row.

    ``lengths``, ``first_s`` and ``graphs`` hold the lengths in the order of their first calls, the seconds each took, and the
    number of graphs compiled by then. ``steady`` holds, for a sample of lengths, milliseconds of the code that serves all lengths
    and of code compiled for this length only.
    """
    lengths = distinct_lengths(shortest, longest)

    def prompt(tokens: int) -> Tensors:
        return structured_prompt(tokens, _AIM, **SHAPE)

    _forget()
    counters.clear()
    first, graphs = [], []
    with torch.no_grad():
        for tokens in lengths:
            call = methods.call(prompt(tokens), backend, gamma, DEFAULT_FLOOR)
            first.append(round(seconds(call), 4))
            graphs.append(int(counters["stats"]["unique_graphs"]))
            if first[-1] > 0.5:
                say(f"  {tokens:,} tokens: first call {first[-1]:.1f} s, {graphs[-1]} graphs so far")
        say(f"  {len(lengths)} lengths: {sum(first):.1f} s of first calls, {graphs[-1]} graphs")
        sample = [sorted(lengths)[index] for index in _SAMPLE]
        steady: list[dict[str, Any]] = [_steady("any_length", tokens, prompt(tokens), backend, gamma) for tokens in sample]
        for row in steady:
            _forget()
            with constant_sizes():
                row |= _steady("one_length", row["tokens"], prompt(row["tokens"]), backend, gamma)
            say("  " + ", ".join(f"{name} {value:.5g}" for name, value in row.items() if not isinstance(value, str)))
    _forget()
    return {"lengths": lengths, "first_s": first, "graphs": graphs, "total_s": sum(first), "steady": steady}


def constant_sizes() -> Any:
    """Return a context that compiles the search for the length at hand: sizes nobody marks dynamic are compile-time constants."""
    return mock.patch.object(search, "with_dynamic", lambda tensor, dim: tensor)


def _steady(name: str, tokens: int, tensors: Tensors, backend: str, gamma: float) -> dict[str, Any]:
    """Time the first call, which may compile, and the warm call."""
    call = methods.call(tensors, backend, gamma, DEFAULT_FLOOR)
    row: dict[str, Any] = {"tokens": tokens}
    try:
        row[f"{name}_first_s"] = round(seconds(call), 4)
    except Exception as error:
        return row | {f"{name}_error": text_of(error)}
    return row | {f"{name}_ms": interleaved({"call": call})["call"]}


def _forget() -> None:
    """Drop everything this process compiled; the cache on disk stays."""
    torch._dynamo.reset()
    compilation._compile.cache_clear()
