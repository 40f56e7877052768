"""The recorded calls of a run: their statistics on the host, and their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmask.stats import FlexPrefillStats

# the reason of single heads
DENSE_HEAD = "dense attention is faster for the heads of its key head"
_TENSORS = tuple(field.name for field in fields(FlexPrefillStats) if field.name != "dense")


class RecordedCall(NamedTuple):
    """One prefill call of one layer."""

    stats: FlexPrefillStats
    reason: str | None  # why it ran dense
    prefill: int  # the number of its prefill, from 0
    q_len: int  # rows
    kv_len: int  # tokens so far, the rows' own included, as far as the host knew
    sequence: int = 0  # of a pack


Calls = Mapping[int, Sequence[RecordedCall]]


def on_host(calls: Calls) -> dict[int, list[RecordedCall]]:
    """The same calls with their statistics on the CPU: one copy, hence one wait, a device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for stats in (call.stats for layer in calls.values() for call in layer):
        for name in _TENSORS:
            tensor = getattr(stats, name)
            if tensor.device.type != "cpu":
                by_device.setdefault(tensor.device, []).append(tensor)
    copies: dict[int, Tensor] = {}
    for tensors in by_device.values():
        # counts of blocks are whole numbers far below 2^24, where float32 begins to round
        together = torch.cat([tensor.detach().flatten().float() for tensor in tensors]).cpu()
        for tensor, copy in zip(tensors, together.split([tensor.numel() for tensor in tensors]), strict=True):
            copies[id(tensor)] = copy.view(tensor.shape).to(tensor.dtype)

    def copied(stats: FlexPrefillStats) -> FlexPrefillStats:
        tensors = {name: getattr(stats, name) for name in _TENSORS}
        return replace(stats, **{name: copies.get(id(tensor), tensor) for name, tensor in tensors.items()})

    return {layer: [call._replace(stats=copied(call.stats)) for call in each] for layer, each in calls.items()}


def rows_of(calls: Calls) -> list[dict[str, Any]]:
    """One row a layer, prefill call, packed sequence, batch row and head."""
    rows = []
    for layer, each in sorted(on_host(calls).items()):
        for call in each:
            stats = call.stats
            numbers = {name: getattr(stats, name).tolist() for name in _TENSORS}
            for batch in range(stats.density.shape[0]):
                for head in range(stats.density.shape[1]):
                    here = {name: values[batch][head] for name, values in numbers.items()}
                    rows.append(
                        {
                            "layer": layer,
                            "call": call.prefill,
                            "sequence": call.sequence,
                            "batch": batch,
                            "head": head,
                            "pattern": pattern_of(stats.dense, here["is_query_aware"], here["row_coverage"]),
                            "distance": here["js_distance"],
                            "density": here["density"],
                            "coverage": here["coverage"],
                            "row_coverage": here["row_coverage"],
                            "q_len": call.q_len,
                            "kv_len": call.kv_len,
                            "reason": DENSE_HEAD if call.reason is None and here["is_dense"] else call.reason,
                        }
                    )
    return rows


def pattern_of(dense: bool, is_query_aware: bool, row_coverage: float) -> str:
    """A head's pattern in words; hybrid selection, which alone knows the coverage of rows, has none."""
    if dense:
        return "dense"
    if row_coverage == row_coverage:  # not NaN
        return "hybrid"
    return "query-aware" if is_query_aware else "vertical-slash"
