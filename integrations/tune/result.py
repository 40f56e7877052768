"""The outcome of `tune`, and the gammas per head for a target density or error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flexmask.base.checks import check_real, check_share
from flexmask.integrations.tune.measured import AtGamma, MeasuredErrors
from flexmask.settings import PrefillSettings

_ROUNDING = 1e-9  # of sums of shares


@dataclass(frozen=True)
class TuneResult:
    """The gammas that `tune` found, with predicted density and error.

    Attributes
    ----------
    settings
        A gamma per head for every measured layer.
    density, error
        Predicted share of the visible blocks that these layers keep, and error as `tune` defines it, mean over heads.
    curve
        (density, error) before the first head is lowered and after each step.
    uniform
        (gamma, density, error) of one gamma for all heads.
    dense
        By layer index: why a layer stays dense. Such layers do not count in `density` and `error`.
    """

    settings: PrefillSettings
    density: float
    error: float
    curve: tuple[tuple[float, float], ...] = field(repr=False)
    uniform: tuple[tuple[float, float, float], ...] = field(repr=False)
    dense: dict[int, str] = field(repr=False)
    _chosen: tuple[AtGamma, ...] = field(repr=False)
    _measured: MeasuredErrors = field(repr=False)

    def rows(self, every_gamma: bool = False) -> list[dict[str, Any]]:
        """One row per layer and head with gamma, density and error; with `every_gamma` one per measured gamma."""
        heads = self._measured.choices()
        return [
            {
                "layer": layer,
                "head": head,
                "gamma": choice.gamma,
                "density": choice.blocks / self._measured.share_of(layer),
                "error": choice.error,
            }
            for ((layer, head), choices), chosen in zip(heads.items(), self._chosen, strict=True)
            for choice in (choices if every_gamma else [chosen])
        ]

    def at(self, *, density: float | None = None, error: float | None = None) -> TuneResult:
        """The result for another target from the same measurements; arguments as in `tune`."""
        check_target(density, error)
        return result_of(self.settings, self._measured, density, error)


def result_of(base: PrefillSettings, measured: MeasuredErrors, density: float | None, error: float | None) -> TuneResult:
    """The gammas for one target; `base` holds the other options."""
    heads = measured.choices()
    allocation = allocate(list(heads.values()))
    if density is not None:
        steps = allocation.steps_to_density(density)
        if steps is None:
            least = allocation.curve[-1][0]
            raise ValueError(f"density must be at least {least:.4f}, that of the lowest gammas in every head; got {density}")
    else:
        assert error is not None
        steps = allocation.steps_to_error(error)
        if steps is None:
            least = allocation.curve[0][1]
            raise ValueError(f"error must be at least {least:.3g}, that of the highest gammas in every head; got {error}")
    chosen = tuple(allocation.after(steps))
    layers: dict[int, list[float]] = {}
    for (layer, _), choice in zip(heads, chosen, strict=True):
        layers.setdefault(layer, []).append(choice.gamma)
    settings = base.with_fields(layers={layer: {"gamma": tuple(by_head)} for layer, by_head in layers.items()})
    all_choices = list(heads.values())
    uniform = tuple(
        (gamma, sum(head[i].blocks for head in all_choices), sum(head[i].error for head in all_choices) / len(heads))
        for i, gamma in enumerate(measured.gammas)
    )
    dense = dict(sorted(measured.dense.items()))
    return TuneResult(settings, *allocation.curve[steps], allocation.curve, uniform, dense, chosen, measured)


def check_target(density: float | None, error: float | None) -> None:
    if (density is None) == (error is None):
        raise ValueError(f"density or error must be given, and not both; got density {density} and error {error}")
    if density is not None:
        check_share("density", density)
    if error is not None:
        check_real("error", error)
        if error < 0:
            raise ValueError(f"error must be >= 0; got {error}")


class Lowering(NamedTuple):
    """A head's next lower gamma."""

    price: float  # error per block saved
    head: int
    choice: AtGamma


class Allocation(NamedTuple):
    """The whole way from the highest gammas to the lowest."""

    highest: tuple[AtGamma, ...]  # by head
    steps: tuple[Lowering, ...]  # cheapest first
    curve: tuple[tuple[float, float], ...]  # density and mean error, before the first step and after each

    def steps_to_density(self, density: float) -> int | None:
        """The fewest steps that keep at most `density`."""
        return next((number for number, (kept, _) in enumerate(self.curve) if kept <= density + _ROUNDING), None)

    def steps_to_error(self, error: float) -> int | None:
        """The most steps with a mean error of at most `error`."""
        within = [number for number, (_, mean) in enumerate(self.curve) if mean <= error]
        return within[-1] if within else None

    def after(self, steps: int) -> list[AtGamma]:
        chosen = list(self.highest)
        for step in self.steps[:steps]:
            chosen[step.head] = step.choice
        return chosen


def allocate(heads: Sequence[Sequence[AtGamma]]) -> Allocation:
    """Lower gammas greedily where a block costs least error: a head's prices never fall, so one sort orders all steps."""
    highest = tuple(_densest(choices) for choices in heads)
    steps = [step for head, choices in enumerate(heads) for step in _way_down(head, choices)]
    # stable: keeps each head's order
    steps.sort(key=lambda step: step.price)
    density, error = sum(choice.blocks for choice in highest), sum(choice.error for choice in highest)
    curve, now = [(density, error / len(highest))], list(highest)
    for step in steps:
        density += step.choice.blocks - now[step.head].blocks
        error += step.choice.error - now[step.head].error
        now[step.head] = step.choice
        curve.append((density, error / len(highest)))
    return Allocation(highest, tuple(steps), tuple(curve))


def _densest(choices: Sequence[AtGamma]) -> AtGamma:
    # the most exact gamma with the most blocks
    return max(choices, key=lambda choice: (choice.blocks, -choice.error, choice.gamma))


def _way_down(head: int, choices: Sequence[AtGamma]) -> list[Lowering]:
    """A head's lower convex hull of error over blocks."""
    current = _densest(choices)
    steps: list[Lowering] = []
    while True:
        below = [
            Lowering((choice.error - current.error) / (current.blocks - choice.blocks), head, choice)
            for choice in choices
            if choice.blocks < current.blocks
        ]
        if not below:
            return steps
        # of equal prices the shortest step, which meets a target more closely
        steps.append(min(below, key=lambda step: (step.price, -step.choice.blocks)))
        current = steps[-1].choice
