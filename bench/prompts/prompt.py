"""The prompts that all benchmarks share, built on first use; calibrations are kept with the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bench import ON_GPU
from bench.prompts.calibration import calibrated_prompt, landed, measured_density
from bench.prompts.captured import LAYERS, retriever_prompt
from bench.prompts.structured import ALL_TOPICS, RECIPES, Tensors, structured_prompt

GAMMA = 0.9
DEFAULT_FLOOR = 1024
# Llama-3.1-8B's, and a small one for CPUs
SHAPE: dict[str, Any] = (
    {"num_heads": 32, "num_kv_heads": 8, "device": "cuda", "dtype": torch.bfloat16}
    if ON_GPU
    else {"num_heads": 8, "num_kv_heads": 2, "device": "cpu", "dtype": torch.float32}
)
_MIXTURES = {"mixture": RECIPES, "topics": ALL_TOPICS}
_CAPTURED = {"retriever": LAYERS, "retriever, layers 1 and 2": (1, 2)}
INPUTS = (*_MIXTURES, *_CAPTURED)


class Calibrations(Protocol):
    """Storage of calibrations between runs, as `bench.measure.results.Results` is."""

    def missing(self, part: str, **key: Any) -> bool:
        """Return whether the row of this key still has to be made."""

    def find(self, part: str, **key: Any) -> dict[str, Any] | None:
        """Return the row of this key, if there is one."""

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Save a row."""


def named_density(tokens: int) -> float:
    """Return the density at which the targets for this length are stated."""
    if tokens < 4096:
        return 0.6  # with so few blocks, most are always kept
    return 0.2 if tokens < 131072 else 0.15 if tokens < 524288 else 0.08


def floor_of(tokens: int) -> int:
    """Return the `min_budget` of rows at a named density.

    The default of 1,024 tokens keeps 8 key blocks and 8 block diagonals in every head. At 8k tokens (64 blocks) those alone are a
    density of .27, which puts .2 out of reach. Below 32k the floor is therefore 256 tokens, two blocks.
    """
    return 256 if tokens < 32768 else DEFAULT_FLOOR


@dataclass
class Prompt:
    """One input to measure on; its tensors are built on first use.

    Attributes
    ----------
    input
        One of `INPUTS`.
    tokens, min_budget
        Length, and the floor of the calls on it.
    named_density
        Mixtures only: the density that calibration aims for at gamma = 0.9, or None.
    aim
        Mixtures only: the density passed to `structured_prompt` as it is, without calibration, or None.
    """

    input: str
    tokens: int
    min_budget: int
    named_density: float | None = None
    aim: float | None = None

    def __post_init__(self) -> None:
        self._tensors: Tensors | None = None
        self._measured: dict[tuple[float, int], tuple[float, float]] = {}

    @property
    def key(self) -> dict[str, Any]:
        """The fields that all rows measured on this prompt share."""
        return {"input": self.input, "tokens": self.tokens, "named_density": self.named_density, "aim": self.aim}

    def tensors(self, calibrations: Calibrations | None = None) -> Tensors:
        """Return query, key and value, calibrated by `calibrations` if possible; new calibrations are saved there."""
        if self._tensors is None:
            self._tensors = self._make(calibrations)
        return self._tensors

    def measured(self, gamma: float, min_budget: int, calibrations: Calibrations | None = None) -> dict[str, float]:
        """Return the density and the share of query-aware heads of a call, as fields of a row."""
        query, key, _ = self.tensors(calibrations)  # calibrating may measure this very call
        if (gamma, min_budget) not in self._measured:
            self._measured[gamma, min_budget] = measured_density(query, key, gamma, min_budget=min_budget)
        density, query_aware = self._measured[gamma, min_budget]
        return {"density": round(density, 4), "query_aware": round(query_aware, 4)}

    def _make(self, calibrations: Calibrations | None) -> Tensors:
        print(f"  input: {self.input}, {self.tokens:,} tokens", flush=True)
        if self.input in _CAPTURED:
            return retriever_prompt(self.tokens, layers=_CAPTURED[self.input], device=SHAPE["device"], dtype=SHAPE["dtype"])
        if self.named_density is None:
            assert self.aim is not None
            return structured_prompt(self.tokens, self.aim, recipes=_MIXTURES[self.input], **SHAPE)
        return self._calibrated(self.named_density, calibrations)

    def _calibrated(self, density: float, calibrations: Calibrations | None) -> Tensors:
        key = self.key | {"gamma": GAMMA, "min_budget": self.min_budget, "method": "calibration"}
        known = None
        if calibrations is not None and not calibrations.missing("inputs", **key):
            known = calibrations.find("inputs", **key)
        found = calibrated_prompt(
            self.tokens,
            density,
            gamma=GAMMA,
            min_budget=self.min_budget,
            aim=None if known is None else known["found_aim"],
            log=lambda line: print(line, flush=True),
            recipes=_MIXTURES[self.input],
            **SHAPE,
        )
        self._measured[GAMMA, self.min_budget] = found.density, found.query_aware
        met = landed(found.density, density)
        if known is None and calibrations is not None:
            fields = {
                "found_aim": found.aim,
                "density": round(found.density, 4),
                "query_aware": found.query_aware,
                "masks_made": found.calls,
                "landed": met,
            }
            calibrations.add("inputs", key | fields)
        note = "" if met else f", which misses the named {density}"
        print(f"  density {found.density:.4f}{note}; {found.query_aware:.0%} of the heads are query-aware", flush=True)
        return found.tensors
