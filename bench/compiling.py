"""What compiling costs: the first calls over forty lengths, and what code compiled for one length alone would gain."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import torch
from torch._dynamo.utils import counters

from bench import methods
from bench.inputs import structured_prompt
from bench.measure import interleaved, synchronize, text_of
from bench.methods import Tensors
from bench.prompts import DEFAULT_FLOOR, SHAPE
from flexmask import compilation, search

_LENGTHS = 40
# of the forty, in rising order: those that are compiled once more, for one length, which takes half a minute each
_SAMPLE = (4, 20, 33, 38)
_AIM = 0.15


def distinct_lengths(shortest: int, longest: int, count: int = _LENGTHS) -> list[int]:
    """Different lengths from `shortest` to `longest`, each a constant factor above the one before."""
    factor = (longest / shortest) ** (1 / (count - 1))
    lengths = [round(shortest * factor**step) for step in range(count)]
    assert len(set(lengths)) == count
    # long and short ones by turns, as requests come
    return [lengths[step * 17 % count] for step in range(count)]


def compile_rows(backend: str, shortest: int, longest: int, gamma: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Fields of a row for whole calls with one backend.

    ``lengths``, ``first_s`` and ``graphs``: the lengths in the order of their first calls, the seconds of each, and the graphs
    compiled so far after it. ``steady``: for a sample of them, milliseconds of the code that serves all lengths and of code
    compiled for this length only.
    """
    lengths = distinct_lengths(shortest, longest)

    def prompt(tokens: int) -> Tensors:
        return structured_prompt(tokens, _AIM, **SHAPE)

    _forget()
    counters.clear()
    first, graphs = [], []
    with torch.no_grad():
        for tokens in lengths:
            tensors = prompt(tokens)
            synchronize()
            start = time.perf_counter()
            methods.call(tensors, backend, gamma, DEFAULT_FLOOR)()
            synchronize()
            first.append(round(time.perf_counter() - start, 4))
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
    """A context in which the search is compiled for the length it is called with: sizes are constants unless they are marked."""
    return mock.patch.object(search, "with_dynamic", lambda tensor, dim: tensor)


def _steady(name: str, tokens: int, tensors: Tensors, backend: str, gamma: float) -> dict[str, Any]:
    """Warm milliseconds of the whole call, and the seconds of the first one here, which may compile."""
    whole = methods.call(tensors, backend, gamma, DEFAULT_FLOOR)
    row: dict[str, Any] = {"tokens": tokens}
    try:
        synchronize()
        start = time.perf_counter()
        whole()
        synchronize()
        row[f"{name}_first_s"] = round(time.perf_counter() - start, 4)
    except Exception as error:
        return row | {f"{name}_error": text_of(error)}
    times = cast(dict[str, Any], interleaved({"call": whole}))
    return row | {f"{name}_ms": times["call"]}


def _forget() -> None:
    """Drop everything compiled in this process; what is cached on disk stays."""
    torch._dynamo.reset()
    compilation._compile.cache_clear()
