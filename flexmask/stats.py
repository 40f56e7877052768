"""Statistics of one call, by head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.inputs import HeadGroup
from flexmask.base.selection import BlockLists, Choice


def _statistic(dtype: torch.dtype, dense: float, compute: Callable[..., Tensor] | None = None) -> dict[str, Any]:
    """Metadata of a field: its dtype, its value in a dense call, and the function of lists that computes it, if there is one."""
    return {"dtype": dtype, "dense": dense, "compute": compute}


def density(lists: BlockLists, problem: BlockProblem) -> Tensor:
    """Kept blocks as a share of the visible ones, (batch, num_heads) float32."""
    visible = problem.num_blocks_seen().sum(-1)
    kept = (lists.kv_num_blocks + lists.full_kv_num_blocks).sum(-1)
    return kept.float() / visible.clamp(min=1)[:, None]


@dataclass(frozen=True)
class SelectionStats:
    """Statistics of one call; every tensor is (batch, num_heads) on the inputs' device.

    Statistics that a method does not compute are NaN, 0 or False.

    Attributes
    ----------
    is_query_aware
        bool: the head follows its pooled map, else it is vertical-slash (flexprefill, published).
    js_distance
        float32: Jensen-Shannon distance of the pooled estimate to the true attention, in [0, sqrt(ln 2)] (of the same methods).
    density
        float32: kept blocks / visible blocks; 1 in dense calls.
    num_vertical_blocks, num_slash_blocks
        int64: kept key blocks (flexprefill, published, hybrid) and block diagonals (flexprefill, published) without those kept
        always; a query-aware head's are its `min_budget`.
    coverage
        float32: true attention of the representative rows held by the kept blocks (flexprefill, published, hybrid); 1 in dense
        calls.
    row_coverage
        float32: attention of the sampled rows to key means that the kept blocks hold, mean over query blocks (hybrid).
    min_row_coverage
        float32: the smallest row_coverage of any query block (hybrid). Not the option `min_coverage`, which bounds a share of R.
    dense_heads
        bool: the head ran dense; its other statistics stay those of its mask. True in dense calls.
    dense
        True if the call ran dense attention instead of the selection.
    """

    is_query_aware: Tensor = field(metadata=_statistic(torch.bool, False))
    js_distance: Tensor = field(metadata=_statistic(torch.float32, math.nan))
    density: Tensor = field(metadata=_statistic(torch.float32, 1, density))
    num_vertical_blocks: Tensor = field(metadata=_statistic(torch.int64, 0))
    num_slash_blocks: Tensor = field(metadata=_statistic(torch.int64, 0))
    coverage: Tensor = field(metadata=_statistic(torch.float32, 1))
    row_coverage: Tensor = field(metadata=_statistic(torch.float32, math.nan))
    min_row_coverage: Tensor = field(metadata=_statistic(torch.float32, math.nan))
    dense_heads: Tensor = field(metadata=_statistic(torch.bool, True))
    dense: bool = False


_FIELDS = {statistic.name: dict(statistic.metadata) for statistic in fields(SelectionStats) if statistic.metadata}
TENSORS = tuple(_FIELDS)  # names of the fields that are tensors
STATISTICS = tuple(name for name in TENSORS if name != "dense_heads")  # names of those that a selection computes
FROM_LISTS = tuple(name for name in STATISTICS if _FIELDS[name]["compute"] is not None)  # names of those that need no map


def compute_statistics(choice: Choice, names: Iterable[str], problem: BlockProblem) -> dict[str, Tensor]:
    """The statistics of these names, (batch, num_heads) each."""
    heads, values = problem.inputs.query.shape[:2], {}
    for name in names:
        from_lists, from_map = _FIELDS[name]["compute"], choice.statistics.get(name)
        if from_map is not None:
            # `select` has the map made wherever it is read
            assert choice.keep is not None
            value = from_map(choice.keep)
        elif from_lists is not None:
            value = from_lists(choice.lists, problem)
        else:
            value = _absent(name, choice.lists.kv_num_blocks[:, :, 0])
        # operators' results must not share memory
        values[name] = value.expand(heads).clone()
    return values


def empty_statistics(names: Iterable[str], heads: Tensor) -> list[Tensor]:
    """Unwritten tensors for the statistics of these names, shaped like `heads`."""
    return [torch.empty_like(heads, dtype=_FIELDS[name]["dtype"]) for name in names]


def merge_group_stats(
    group_stats: Sequence[Mapping[str, Tensor]], groups: Sequence[HeadGroup], dense: Sequence[Sequence[bool]] = ()
) -> SelectionStats:
    """Merge the statistics of groups into those of all heads; `dense`, by group and KV head: it ran dense."""
    heads = group_stats[0]["density"].new_empty((groups[-1].batch_rows.stop, groups[-1].query_heads.stop))
    whole = {name: _absent(name, heads) for name in TENSORS}
    for index, (statistics, group) in enumerate(zip(group_stats, groups, strict=True)):
        for name, values in statistics.items():
            whole[name][group.batch_rows, group.query_heads] = values
        dense_kv_heads = dense[index] if dense else []
        queries_per_kv = (group.query_heads.stop - group.query_heads.start) // max(len(dense_kv_heads), 1)
        for kv_head, is_dense in enumerate(dense_kv_heads):
            first = group.query_heads.start + kv_head * queries_per_kv
            whole["dense_heads"][group.batch_rows, first : first + queries_per_kv] = is_dense
    return SelectionStats(**whole)  # type: ignore[arg-type]  # mypy takes each for `dense`


def dense_stats(query: Tensor) -> SelectionStats:
    """The statistics of a dense call."""
    heads = query.new_empty(query.shape[:2])
    values = {name: torch.full_like(heads, statistic["dense"], dtype=statistic["dtype"]) for name, statistic in _FIELDS.items()}
    return SelectionStats(**values, dense=True)


def _absent(name: str, like: Tensor) -> Tensor:
    """A statistic that a method does not compute, shaped like `like`."""
    dtype = _FIELDS[name]["dtype"]
    return torch.full_like(like, math.nan if dtype.is_floating_point else 0, dtype=dtype)
