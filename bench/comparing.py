"""Methods measured in turns on one prompt, each beside dense attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from bench import methods
from bench.measure import ROUNDS, interleaved, text_of, wall_and_graph
from bench.methods import BACKENDS, DENSE, OTHER_MASKS, Tensors
from bench.prompts import GAMMA, ON_GPU, Prompt
from bench.rows import Row
from bench.run import Run

Make = Callable[[Tensors], Callable[[], Any]]


@dataclass(frozen=True)
class Compared:
    """One method on one prompt."""

    method: str
    make: Make
    gamma: float | None = None
    min_budget: int | None = None
    is_dense: bool = False

    def key(self, prompt: Prompt) -> Row:
        """Its row's key."""
        return prompt.key | {"gamma": self.gamma, "min_budget": self.min_budget, "method": self.method}


def dense_methods() -> list[Compared]:
    """Dense attention, the one that ratios are to first."""
    found = [Compared(DENSE, methods.dense_sdpa, is_dense=True)]
    if ON_GPU:
        flash2 = partial(methods.dense_sdpa, backend=SDPBackend.FLASH_ATTENTION)
        found.append(Compared("dense FlashAttention-2", flash2, is_dense=True))
    for backend in BACKENDS:
        found.append(Compared(f"dense flex {backend}", partial(methods.dense_flex, backend=backend), is_dense=True))
    return found


def calls(backend: str, gammas: Sequence[float], min_budget: int) -> list[Compared]:
    """Whole calls by gamma."""
    return [
        Compared(f"call {backend}", partial(methods.call, backend=backend, gamma=gamma, min_budget=min_budget), gamma, min_budget)
        for gamma in gammas
    ]


def masks(gammas: Sequence[float], min_budget: int) -> list[Compared]:
    """Masks alone by gamma."""
    return [Compared("mask", partial(methods.mask, gamma=gamma, min_budget=min_budget), gamma, min_budget) for gamma in gammas]


def kernels(min_budget: int) -> list[Compared]:
    """Attention alone over a mask made beforehand, by backend."""

    def make(tensors: Tensors, backend: str) -> Callable[[], Any]:
        return methods.kernel(tensors, methods.mask(tensors, GAMMA, min_budget)(), backend)

    return [Compared(f"kernel {backend}", partial(make, backend=backend), GAMMA, min_budget) for backend in BACKENDS]


def others() -> list[Compared]:
    """The other masks of `flexmask.block_masks`, alone and with attention, at their defaults."""
    found = []
    for name in OTHER_MASKS:
        found.append(Compared(f"block_masks {name}, mask", partial(methods.other_mask, name=name)))
        call = partial(methods.other_call, name=name, backend=BACKENDS[0])
        found.append(Compared(f"block_masks {name}, call {BACKENDS[0]}", call))
    return found


def compare(run: Run, prompt: Prompt, group: Sequence[Compared], rounds: int = ROUNDS, graphs: bool = True) -> None:
    """Measure the missing methods of a group in turns with dense attention, and save a row for each."""
    keys = {compared.method + str(compared.gamma): compared for compared in group}

    def work(missing: list[Row]) -> None:
        tensors = prompt.tensors(run.results)
        built: dict[str, Callable[[], Any]] = {}
        failed: dict[str, dict[str, Any]] = {}
        wanted = {row["method"] + str(row["gamma"]): row for row in missing}
        with torch.no_grad():
            for name in {DENSE + "None": None, **wanted}:
                make = keys[name].make if name in keys else methods.dense_sdpa
                try:
                    methods.warm(make, tensors)
                    built[name] = make(tensors)
                except Exception as error:
                    failed[name] = {"error": text_of(error)}
            times: dict[str, dict[str, Any]]
            if graphs:
                times = wall_and_graph(built, rounds)
            else:
                taken = interleaved(built, rounds)
                times = {name: {"error": t} if isinstance(t, str) else {"wall_ms": t} for name, t in taken.items()}
        built.clear()
        times |= failed
        dense = times[DENSE + "None"]
        for name, row in wanted.items():
            compared = keys[name]
            fields: Row = {}
            if compared.gamma is not None and compared.min_budget is not None:
                fields |= prompt.measured(run.results, compared.gamma, compared.min_budget)
            run.add(row | shape_fields(tensors) | fields | times[name] | ratios(times[name], dense))

    what = f"{prompt.input}, {prompt.tokens:,} tokens, " + ", ".join(dict.fromkeys(compared.method for compared in group))
    run.step(what, [compared.key(prompt) for compared in group], work)


def shape_fields(tensors: Tensors) -> Row:
    """The shape, as fields of a row."""
    query, key, _ = tensors
    return {"num_heads": query.shape[1], "num_kv_heads": key.shape[1], "head_dim": query.shape[3], "dtype": str(query.dtype)[6:]}


def ratios(times: dict[str, Any], dense: dict[str, Any]) -> Row:
    """Dense attention's times in the same run, and how many times as fast this was."""
    fields: Row = {}
    for clock, dense_name, ratio in (("wall_ms", "dense_ms", "ratio"), ("graph_ms", "dense_graph_ms", "graph_ratio")):
        if clock in dense:
            fields[dense_name] = dense[clock]
            if clock in times:
                fields[ratio] = dense[clock] / times[clock]
    return fields
