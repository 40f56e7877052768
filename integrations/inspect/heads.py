"""The heads that an inspection shows: named ones, or a choice by `RULE`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

RULE = (
    "Of the heads that ran sparse: the one of the lowest density, of the median density, of the highest density, and of the "
    "lowest coverage, where the method computes it; and where these are all of one pattern, the head of the median density of "
    "the other pattern."
)
NAMED = "named"


class ChosenHead(NamedTuple):
    layer: int
    head: int
    why: str


def heads_by_rule(rows: Sequence[Mapping[str, Any]], layers: Sequence[int] | None = None) -> list[ChosenHead]:
    """Heads by `RULE` among the `rows` of one prefill; none if every head ran dense."""
    sparse = [row for row in rows if row["pattern"] != "dense" and (layers is None or row["layer"] in layers)]
    if not sparse:
        return []
    by_density = sorted(sparse, key=lambda row: (row["density"], row["layer"], row["head"]))
    chosen = [
        (by_density[0], "lowest density"),
        (by_density[len(by_density) // 2], "median density"),
        (by_density[-1], "highest density"),
    ]
    covered = [row for row in sparse if not math.isnan(row["coverage"])]
    if covered:
        chosen.append((min(covered, key=lambda row: (row["coverage"], row["layer"], row["head"])), "lowest coverage"))
    shown = {row["pattern"] for row, _ in chosen}
    for pattern in sorted({row["pattern"] for row in sparse} - shown):
        own = [row for row in by_density if row["pattern"] == pattern]
        chosen.append((own[len(own) // 2], f"median density of the {pattern} heads"))
    reasons: dict[tuple[int, int], list[str]] = {}
    for row, why in chosen:
        reasons.setdefault((row["layer"], row["head"]), []).append(why)
    return [ChosenHead(*place, ", ".join(why)) for place, why in reasons.items()]


def named_heads(rows: Sequence[Mapping[str, Any]], layers: Sequence[int], heads: Sequence[int]) -> list[ChosenHead]:
    """Every pair of `layers` and `heads`; ValueError for a missing head or a dense layer."""
    patterns = {(row["layer"], row["head"]): row["pattern"] for row in rows}
    found = []
    for layer in dict.fromkeys(layers):
        for head in dict.fromkeys(heads):
            if (layer, head) not in patterns:
                number = sum(place[0] == layer for place in patterns)
                raise ValueError(f"heads must be in [0, {number}) in layer {layer}; got {head}")
            if patterns[layer, head] == "dense":
                raise ValueError(f"layers must have run sparse; layer {layer} ran dense")
            found.append(ChosenHead(layer, head, NAMED))
    return found
