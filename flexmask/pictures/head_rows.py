"""Values by layer and head, from the rows of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_PATTERNS = ("vertical-slash", "query-aware")


class HeadMap(NamedTuple):
    """One value per layer and head; NaN where a head has none."""

    layers: list[int]
    values: list[list[float]]  # by layer, by head
    dense: list[list[bool]]  # in every call
    missing: list[list[bool]]  # layers may differ in their number of heads


def rows_of(source: Any) -> list[Mapping[str, Any]]:
    """The rows of a run or of a tuning result, or rows as they are, at least one."""
    rows = source.rows() if callable(getattr(source, "rows", None)) else source
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes, Mapping)):
        raise TypeError(f"source must have rows(), as a run has, or be such rows; got {type(source).__name__}")
    found = list(rows)
    if not all(isinstance(row, Mapping) and {"layer", "head"} <= row.keys() for row in found):
        raise TypeError("source must have rows that are dicts with layer and head")
    if not found:
        raise ValueError("source must hold at least one prefill call; got none (collect_stats=False keeps no statistics)")
    return found


def head_map(source: Any, name: str) -> HeadMap:
    """The mean of `name` by layer and head over calls and batch rows, over sparse ones if there are any."""
    rows = rows_of(source)
    if not all(name in row for row in rows):
        raise ValueError(f"source must have {name} in every row; got {', '.join(map(str, rows[0]))}")
    layers = sorted({row["layer"] for row in rows})
    number = 1 + max(row["head"] for row in rows)
    heads: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        heads.setdefault((row["layer"], row["head"]), []).append(row)

    def mean(layer: int, head: int) -> float:
        own = heads.get((layer, head), [])
        sparse = [row for row in own if row.get("pattern") != "dense"]
        values = [float(row[name]) for row in sparse or own]
        return sum(values) / len(values) if values else float("nan")

    def is_dense(layer: int, head: int) -> bool:
        own = heads.get((layer, head), [])
        return bool(own) and all(row.get("pattern") == "dense" for row in own)

    return HeadMap(
        layers,
        [[mean(layer, head) for head in range(number)] for layer in layers],
        [[is_dense(layer, head) for head in range(number)] for layer in layers],
        [[(layer, head) not in heads for head in range(number)] for layer in layers],
    )


def pattern_shares(source: Any) -> tuple[list[int], dict[str, list[float]]]:
    """The layers, and by pattern the share of each layer's heads, over calls and batch rows."""
    rows = rows_of(source)
    if not all("pattern" in row for row in rows):
        raise ValueError("source must have the pattern in every row, as those of a run have")
    layers = sorted({row["layer"] for row in rows})
    found = {row["pattern"] for row in rows}
    # a method without patterns, then dense, last
    order = (*_PATTERNS, *sorted(found - {*_PATTERNS, "dense"}), "dense")
    counts = {pattern: dict.fromkeys(layers, 0) for pattern in order if pattern in found}
    for row in rows:
        counts[row["pattern"]][row["layer"]] += 1
    totals = {layer: sum(by_layer[layer] for by_layer in counts.values()) for layer in layers}
    return layers, {pattern: [each[layer] / totals[layer] for layer in layers] for pattern, each in counts.items()}


def query_aware_heads(rows: list[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """The (layer, head) that are query-aware in at least half of their rows."""
    counts: dict[tuple[int, int], list[bool]] = {}
    for row in rows:
        counts.setdefault((row["layer"], row["head"]), []).append(row.get("pattern") == "query-aware")
    return [head for head, each in counts.items() if 2 * sum(each) >= len(each)]
