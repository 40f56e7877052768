"""The outcome of `tune`, and the gammas per head for a target density or error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flexmask.base.checks import check_real, check_share
from flexmask.integrations.tune.measured import MeasuredErrors
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
    _chosen: tuple[int, ...] = field(repr=False)  # the gamma of each head, by its place among the measured ones
    _measured: MeasuredErrors = field(repr=False)

    def rows(self, every_gamma: bool = False) -> list[dict[str, Any]]:
        """One row per layer and head with gamma, density and error; with `every_gamma` one per measured gamma."""
        gammas, (visible, blocks, errors) = self._measured.gammas, (x.tolist() for x in self._measured.by_head())
        return [
            {
                "layer": layer,
                "head": head,
                "gamma": gammas[choice],
                "density": blocks[number][choice] / visible[number],
                "error": errors[number][choice],
            }
            for number, (layer, head) in enumerate(self._measured.heads())
            for choice in (range(len(gammas)) if every_gamma else [self._chosen[number]])
        ]

    def at(self, *, density: float | None = None, error: float | None = None) -> TuneResult:
        """The result for another target from the same measurements; arguments as in `tune`."""
        check_target(density, error)
        return result_of(self.settings, self._measured, density, error)


class Step(NamedTuple):
    """A gamma on a head's way down; the first is the one it begins with."""

    head: int
    choice: int  # place among the gammas
    saved: float  # blocks, as a share of those of all heads
    cost: float  # error


def result_of(base: PrefillSettings, measured: MeasuredErrors, density: float | None, error: float | None) -> TuneResult:
    """The gammas for one target; `base` holds the other options.

    Lowers gammas greedily where a block costs least error: a head's prices never fall, so one sort orders all steps.
    """
    _, blocks, errors = measured.by_head()
    ways = [_way_down(head, *of_head) for head, of_head in enumerate(zip(blocks.tolist(), errors.tolist(), strict=True))]
    chosen = [way[0].choice for way in ways]
    # stable: keeps each head's order
    steps = sorted((step for way in ways for step in way[1:]), key=lambda step: step.cost / step.saved)
    begin = [(blocks[head, choice], errors[head, choice]) for head, choice in enumerate(chosen)]
    curve = [(float(sum(kept for kept, _ in begin)), float(sum(lost for _, lost in begin)) / len(chosen))]
    for step in steps:
        curve.append((curve[-1][0] - step.saved, curve[-1][1] + step.cost / len(chosen)))
    if density is not None:
        number = next((at for at, (kept, _) in enumerate(curve) if kept <= density + _ROUNDING), None)
        if number is None:
            least = curve[-1][0]
            raise ValueError(f"density must be at least {least:.4f}, that of the lowest gammas in every head; got {density}")
    else:
        assert error is not None
        number = max((at for at, (_, mean) in enumerate(curve) if mean <= error), default=None)
        if number is None:
            least = curve[0][1]
            raise ValueError(f"error must be at least {least:.3g}, that of the highest gammas in every head; got {error}")
    for step in steps[:number]:
        chosen[step.head] = step.choice
    layers: dict[int, tuple[float, ...]] = {}
    for (layer, _), choice in zip(measured.heads(), chosen, strict=True):
        layers[layer] = (*layers.get(layer, ()), measured.gammas[choice])
    settings = base.with_fields(layers={layer: {"gamma": by_head} for layer, by_head in layers.items()})
    uniform = tuple(zip(measured.gammas, blocks.sum(0).tolist(), errors.mean(0).tolist(), strict=True))
    dense = dict(sorted(measured.dense.items()))
    return TuneResult(settings, *curve[number], tuple(curve), uniform, dense, tuple(chosen), measured)


def _way_down(head: int, blocks: Sequence[float], errors: Sequence[float]) -> list[Step]:
    """A head's lower convex hull of error over blocks, from the most exact gamma of those that keep most blocks."""
    choices = range(len(blocks))
    now = max(choices, key=lambda choice: (blocks[choice], -errors[choice], choice))
    way = [Step(head, now, 0.0, 0.0)]
    while True:
        below = [
            Step(head, choice, blocks[now] - blocks[choice], errors[choice] - errors[now])
            for choice in choices
            if blocks[choice] < blocks[now]
        ]
        if not below:
            return way
        # of equal prices the shortest step, which meets a target more closely
        way.append(min(below, key=lambda step: (step.cost / step.saved, step.saved)))
        now = way[-1].choice


def check_target(density: float | None, error: float | None) -> None:
    if (density is None) == (error is None):
        raise ValueError(f"density or error must be given, and not both; got density {density} and error {error}")
    if density is not None:
        check_share("density", density)
    if error is not None:
        check_real("error", error)
        if error < 0:
            raise ValueError(f"error must be >= 0; got {error}")
