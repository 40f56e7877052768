"""Statistics of one call of FlexPrefill, by head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from flexmask.base.inputs import HeadGroup


@dataclass(frozen=True)
class FlexPrefillStats:
    """Statistics of one call; every tensor is (batch, num_heads) on the inputs' device.

    Attributes
    ----------
    is_query_aware
        bool: the head follows its pooled map; otherwise it is vertical-slash.
    js_distance
        float32: Jensen-Shannon distance of the pooled estimate to the true attention, in [0, sqrt(ln 2)]. NaN in dense calls.
    density
        float32: kept blocks / visible blocks.
    num_vertical_blocks, num_slash_blocks
        int64: kept key blocks and block diagonals, those kept always not counted (a query-aware head's are its floor).
    coverage
        float32: true attention of the representative rows held by the kept blocks of their query blocks.
    row_coverage
        float32: row evidence held by the kept blocks, mean over query blocks. NaN where ``selection`` is not ``"hybrid"``.
    is_dense
        bool: dense attention served the head, where that is faster (`dense_below` of `flexprefill_attention`). Density and
        coverage stay those of its mask. True in every head of a dense call.
    dense
        Whether the call ran dense attention instead of the selection: density and coverage are 1 then.
    """

    is_query_aware: Tensor
    js_distance: Tensor
    density: Tensor
    num_vertical_blocks: Tensor
    num_slash_blocks: Tensor
    coverage: Tensor
    row_coverage: Tensor
    is_dense: Tensor
    dense: bool = False


_TENSORS = tuple(field.name for field in fields(FlexPrefillStats) if field.name != "dense")


def empty_stats(query: Tensor, dense: bool) -> FlexPrefillStats:
    """The statistics of a dense call, or room for those of a sparse one."""
    heads = query.new_zeros(query.shape[:2], dtype=torch.float32)
    counts = torch.zeros_like(heads, dtype=torch.int64)
    return FlexPrefillStats(
        is_query_aware=heads.bool(),
        js_distance=torch.full_like(heads, float("nan")),
        density=heads + 1,
        num_vertical_blocks=counts,
        num_slash_blocks=counts.clone(),
        coverage=heads + 1,
        row_coverage=torch.full_like(heads, float("nan")),
        is_dense=torch.full_like(heads, dense, dtype=torch.bool),
        dense=dense,
    )


def stats_of(found: Any, dense_heads: Iterable[slice] = ()) -> FlexPrefillStats:
    """The statistics that a search gives, with `dense_heads`, query heads that dense attention serves."""
    is_dense = torch.zeros_like(found[0])
    for heads in dense_heads:
        is_dense[:, heads] = True
    return FlexPrefillStats(*found, is_dense)  # type: ignore[call-arg]  # mypy lets the star take all


def write_stats(stats: FlexPrefillStats, group: HeadGroup, part: FlexPrefillStats) -> None:
    """Write the statistics of one group of heads to their place."""
    for name in _TENSORS:
        getattr(stats, name)[group.batch, group.query] = getattr(part, name)
