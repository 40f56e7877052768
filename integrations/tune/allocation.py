"""Chooses gammas per head for a target density or error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_ROUNDING = 1e-9  # of sums of shares


class AtGamma(NamedTuple):
    """A head at one gamma."""

    gamma: float
    blocks: float  # kept, as a share of the blocks of all heads
    error: float


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
    """Lower the heads' gammas greedily, each time where dropping a block costs least error.

    A head's steps skip gammas that cost more than lower ones: its prices never fall, and one sort by price orders all steps.
    """
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
