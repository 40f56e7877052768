"""Records how sparse the prompts of an evaluation ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from flexmask.integrations.record import PrefillRun


class Densities:
    """Mean density over all prompts, and by length."""

    def __init__(self) -> None:
        self._prompts: Counter[int] = Counter()
        self._density: defaultdict[int, float] = defaultdict(float)
        self._reasons: Counter[str] = Counter()
        self._measured = True

    def add(self, run: PrefillRun, lengths: Sequence[int]) -> None:
        """Record the prefill of a batch; layers that ran dense count with density 1."""
        calls = [stats.density.float().cpu() for stats in (each for layer in run.stats.values() for each in layer)]
        if calls:
            # mean over beams
            means = torch.stack([call.unflatten(0, (len(lengths), -1)).mean((1, 2)) for call in calls]).mean(0)
        else:
            means = torch.zeros(len(lengths))
            self._measured = False
        for length, density in zip(lengths, means.tolist(), strict=True):
            bucket = 1 << max(length - 1, 0).bit_length()
            self._prompts[bucket] += 1
            self._density[bucket] += density
        reasons = [reason for layer in run.reasons.values() for reason in layer]
        if reasons and None not in reasons:
            self._reasons[reasons[0] or ""] += len(lengths)

    def summary(self) -> dict[str, Any]:
        """The figures in JSON types; densities are None without statistics."""
        prompts = sum(self._prompts.values())

        def mean(total: float, number: int) -> float | None:
            return round(total / number, 4) if self._measured and number else None

        return {
            "prompts": prompts,
            "density": mean(sum(self._density.values()), prompts),
            "by_tokens": {
                f"<={bucket}": {"prompts": number, "density": mean(self._density[bucket], number)}
                for bucket, number in sorted(self._prompts.items())
            },
            "dense_prompts": sum(self._reasons.values()),
            "dense_because": dict(self._reasons.most_common(5)),
        }
