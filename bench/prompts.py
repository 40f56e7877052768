"""The inputs that the parts run on: which lengths at which densities, made when first asked for, their calibration kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bench.calibration import calibrated_prompt, landed, measured
from bench.captured import LAYERS, retriever_prompt
from bench.inputs import ALL_TOPICS, RECIPES, structured_prompt
from bench.methods import Tensors
from bench.rows import Results

ON_GPU = torch.cuda.is_available()
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


def named_density(tokens: int) -> float:
    """The density that targets are stated at."""
    if tokens < 4096:
        return 0.6  # few blocks: most of them are kept always
    return 0.2 if tokens < 131072 else 0.15 if tokens < 524288 else 0.08


def floor_of(tokens: int) -> int:
    """min_budget of the rows at a named density.

    The default of 1,024 tokens keeps 8 key blocks and 8 diagonals in every head: with 64 blocks (8k) that alone is a density of
    .27, and .2 is out of reach. Below 32k the floor is 256 tokens, two blocks.
    """
    return 256 if tokens < 32768 else DEFAULT_FLOOR


@dataclass
class Prompt:
    """One input; `tensors` are made when first asked for.

    Attributes
    ----------
    input
        One of `INPUTS`.
    tokens, min_budget
        The length, and the floor of calls on it.
    named_density
        For mixtures: what gamma = 0.9 is to keep, found by calibration; or None.
    aim
        For mixtures: what `structured_prompt` is given instead, without calibration; or None.
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
        """What the rows measured on it have in common."""
        return {"input": self.input, "tokens": self.tokens, "named_density": self.named_density, "aim": self.aim}

    def tensors(self, results: Results) -> Tensors:
        """Query, key and value; a calibration is looked up in `results`, or made and added to them."""
        if self._tensors is None:
            self._tensors = self._make(results)
        return self._tensors

    def measured(self, results: Results, gamma: float, min_budget: int) -> dict[str, float]:
        """Density and share of query-aware heads of a call, as fields of a row."""
        if (gamma, min_budget) not in self._measured:
            self._measured[gamma, min_budget] = measured(*self.tensors(results)[:2], gamma, min_budget=min_budget)
        density, query_aware = self._measured[gamma, min_budget]
        return {"density": round(density, 4), "query_aware": round(query_aware, 4)}

    def _make(self, results: Results) -> Tensors:
        print(f"  input: {self.input}, {self.tokens:,} tokens", flush=True)
        if self.input in _CAPTURED:
            return retriever_prompt(self.tokens, layers=_CAPTURED[self.input], device=SHAPE["device"], dtype=SHAPE["dtype"])
        shape: dict[str, Any] = SHAPE | {"recipes": _MIXTURES[self.input]}
        if self.named_density is None:
            assert self.aim is not None
            return structured_prompt(self.tokens, self.aim, **shape)

        key = self.key | {"gamma": GAMMA, "min_budget": self.min_budget, "method": "calibration"}
        known = None if results.missing("inputs", **key) else results.find("inputs", **key)
        found = calibrated_prompt(
            self.tokens,
            self.named_density,
            gamma=GAMMA,
            min_budget=self.min_budget,
            aim=None if known is None else known["found_aim"],
            log=lambda line: print(line, flush=True),
            **shape,
        )
        self._measured[GAMMA, self.min_budget] = found.density, found.query_aware
        met = landed(found.density, self.named_density)
        if known is None:
            fields = {
                "found_aim": found.aim,
                "density": round(found.density, 4),
                "query_aware": found.query_aware,
                "masks_made": found.calls,
                "landed": met,
            }
            results.add("inputs", key | fields)
        said = "" if met else f", which is off the named {self.named_density}"
        print(f"  density {found.density:.4f}{said}; {found.query_aware:.0%} of the heads are query-aware", flush=True)
        return found.tensors
