"""The outcome of `tune`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flexmask.base.checks import check_real
from flexmask.integrations.tune.allocation import AtGamma, allocate
from flexmask.integrations.tune.measured import MeasuredErrors
from flexmask.settings import PrefillSettings


@dataclass(frozen=True)
class TuneResult:
    """The gammas that `tune` found, with predicted density and error.

    Attributes
    ----------
    settings
        A gamma per head for every measured layer, for `sparse_prefill`, or `configure` and ``save_pretrained``.
    density
        Predicted share of the visible blocks that these layers keep.
    error
        Predicted error, mean over heads, as `tune` defines it.
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
        return result_of(self.settings, self._measured, self.dense, density, error)


def result_of(
    base: PrefillSettings, measured: MeasuredErrors, dense: dict[int, str], density: float | None, error: float | None
) -> TuneResult:
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
    return TuneResult(settings, *allocation.curve[steps], allocation.curve, uniform, dense, chosen, measured)


def check_target(density: float | None, error: float | None) -> None:
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
