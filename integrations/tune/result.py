"""The outcome of `tune`: gammas by head, and what they are predicted to keep and to lose."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from flexmask.base.checks import check_real
from flexmask.integrations.huggingface.settings import PrefillSettings
from flexmask.integrations.tune.allocation import Allocation, Choice, allocate
from flexmask.integrations.tune.measured import MeasuredErrors


@dataclass(frozen=True)
class TuneResult:
    """The gammas that `tune` found, and what they are predicted to keep and to lose.

    Attributes
    ----------
    settings
        A gamma for every head of every layer that was measured: ``sparse_prefill(model, settings=result.settings)``, or
        ``configure(model, settings=result.settings)`` and then ``save_pretrained``.
    density
        Predicted share of the visible blocks that those layers keep.
    error
        Predicted error of a head, mean over heads: relative squared error of its output, or with `gradient` the squared change of
        the loss over scored tokens, in squared nats.
    curve
        (density, error) before the first head is lowered and after each step.
    uniform
        (gamma, density, error) of one gamma for all heads.
    dense
        By layer index: why a layer stays dense. It counts neither in `density` nor in `error`.
    """

    settings: PrefillSettings
    density: float
    error: float
    curve: tuple[tuple[float, float], ...] = field(repr=False)
    uniform: tuple[tuple[float, float, float], ...] = field(repr=False)
    dense: dict[int, str] = field(repr=False)
    _chosen: tuple[Choice, ...] = field(repr=False)
    _measured: MeasuredErrors = field(repr=False)
    _allocation: Allocation = field(repr=False)

    def rows(self, every_gamma: bool = False) -> list[dict[str, Any]]:
        """One row per layer and head: its gamma, its density and its error, as `error` has it.

        With `every_gamma` one for each gamma that was measured.
        """
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
        """The result for another target, from the same measurements; the arguments are those of `tune`."""
        check_target(density, error)
        return result_of(self.settings, self._measured, self.dense, density, error)


def result_of(
    base: PrefillSettings, measured: MeasuredErrors, dense: dict[int, str], density: float | None, error: float | None
) -> TuneResult:
    """The gammas of all heads for one target; `base` holds every option but those."""
    heads = measured.choices()
    way = allocate(list(heads.values()))
    if density is not None:
        steps = way.steps_to_density(density)
        if steps is None:
            least = way.curve[-1][0]
            raise ValueError(f"density must be at least {least:.4f}, that of the lowest gammas in every head; got {density}")
    else:
        assert error is not None
        steps = way.steps_to_error(error)
        if steps is None:
            least = way.curve[0][1]
            raise ValueError(f"error must be at least {least:.3g}, that of the highest gammas in every head; got {error}")
    chosen = tuple(way.after(steps))
    layers: dict[int, list[float]] = {}
    for (layer, _), choice in zip(heads, chosen, strict=True):
        layers.setdefault(layer, []).append(choice.gamma)
    settings = replace(base, layers={layer: {"gamma": tuple(by_head)} for layer, by_head in layers.items()})
    uniform = tuple(
        (gamma, sum(each[at].blocks for each in heads.values()), sum(each[at].error for each in heads.values()) / len(heads))
        for at, gamma in enumerate(measured.gammas)
    )
    return TuneResult(settings, *way.curve[steps], way.curve, uniform, dense, chosen, measured, way)


def check_target(density: float | None, error: float | None) -> None:
    """Raise unless one of both is given and in its range."""
    if (density is None) == (error is None):
        raise ValueError(f"density or error must be given, and not both; got density {density} and error {error}")
    if density is not None:
        check_real("density", density)
        if not 0 < density <= 1:
            raise ValueError(f"density must be in (0, 1]; got {density}")
    if error is not None:
        check_real("error", error)
        if error < 0:
            raise ValueError(f"error must be >= 0; got {error}")
