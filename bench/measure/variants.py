"""Variants: a method of `bench.measure.methods` with its options bound, under the name that its rows carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.nn.attention import SDPBackend

from bench import ON_GPU
from bench.measure import methods
from bench.measure.methods import BACKENDS, DENSE, OTHER_MASKS
from bench.measure.results import Row
from bench.prompts.prompt import GAMMA, Calibrations, Prompt
from bench.prompts.structured import Tensors


@dataclass(frozen=True)
class Variant:
    """One method with its options bound; gamma and min_budget are None for what has none."""

    method: str
    make: Callable[[Tensors], Callable[[], Any]]
    gamma: float | None = None
    min_budget: int | None = None

    def key(self, prompt: Prompt) -> Row:
        """Return the fields that identify the row of this variant on `prompt`."""
        return prompt.key | {"gamma": self.gamma, "min_budget": self.min_budget, "method": self.method}

    def density(self, prompt: Prompt, calibrations: Calibrations | None = None) -> Row:
        """Return the density of FlexPrefill's mask on `prompt` as fields of a row; none for a method without gamma."""
        if self.gamma is None or self.min_budget is None:
            return {}
        return dict(prompt.measured(self.gamma, self.min_budget, calibrations))


DENSE_BASELINE = Variant(DENSE, methods.dense_sdpa)


def dense_variants() -> list[Variant]:
    """Return dense attention through every kernel on this machine, the baseline first."""
    found = [DENSE_BASELINE]
    if ON_GPU:
        found.append(Variant("dense FlashAttention-2", partial(methods.dense_sdpa, backend=SDPBackend.FLASH_ATTENTION)))
    for backend in BACKENDS:
        found.append(Variant(f"dense flex {backend}", partial(methods.dense_flex, backend=backend)))
    return found


def call_variants(backend: str, gammas: Sequence[float], min_budget: int) -> list[Variant]:
    """Return whole calls, one per gamma."""
    return [
        Variant(f"call {backend}", partial(methods.call, backend=backend, gamma=gamma, min_budget=min_budget), gamma, min_budget)
        for gamma in gammas
    ]


def mask_variants(gammas: Sequence[float], min_budget: int) -> list[Variant]:
    """Return masks alone, one per gamma."""
    return [Variant("mask", partial(methods.mask, gamma=gamma, min_budget=min_budget), gamma, min_budget) for gamma in gammas]


def kernel_variants(min_budget: int) -> list[Variant]:
    """Return attention alone over FlexPrefill's mask, one per backend."""
    return [
        Variant(
            f"kernel {backend}",
            partial(methods.kernel_over_mask, backend=backend, gamma=GAMMA, min_budget=min_budget),
            GAMMA,
            min_budget,
        )
        for backend in BACKENDS
    ]


def gallery_variants() -> list[list[Variant]]:
    """Return a pair for each other mask of `flexmask.block_masks`: the mask alone, and mask and attention."""
    return [
        [
            Variant(f"block_masks {name}, mask", partial(methods.other_mask, name=name)),
            Variant(f"block_masks {name}, call {BACKENDS[0]}", partial(methods.other_call, name=name, backend=BACKENDS[0])),
        ]
        for name in OTHER_MASKS
    ]
