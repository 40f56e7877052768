"""Run a method: by kernels, which are launched, or in plain steps, which torch compiles on accelerators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexmask import plain
from flexmask._torch import HAS_TRITON, materialized, on_device
from flexmask.base.blocks import BlockProblem, block_problem
from flexmask.base.inputs import PositionedInputs
from flexmask.base.selection import Choice, Selection, block_lists
from flexmask.compilation import run_compiled
from flexmask.method import Method
from flexmask.selection.prepare import PreparedSelection
from flexmask.stats import FROM_LISTS, compute_statistics

if HAS_TRITON:
    from flexmask import kernels


def run_kernels(prepared: PreparedSelection, inputs: PositionedInputs, with_map: bool, statistics: tuple[str, ...]) -> Selection:
    """Run a method by kernels."""
    size = prepared.method_for_steps.block_size
    wants_map = with_map or any(name not in FROM_LISTS for name in statistics)
    with on_device(inputs.query.device):
        geometry = prepared.kernel_geometry or kernels.kernel_geometry(inputs, size)
        problem = BlockProblem(inputs, size, kernels, wants_map, geometry)
        if prepared.replay is None or wants_map or statistics:
            return run_on_problem(problem, prepared.method_for_steps, statistics)
        lists = prepared.replay.lists(inputs, lambda: run_on_problem(problem, prepared.method_for_steps, ()).lists)
        return Selection(lists, None, {}, size)


def run_plain(
    prepared: PreparedSelection, inputs: PositionedInputs, statistics: tuple[str, ...], call_end: Tensor | None = None
) -> Selection:
    """Run a method in plain steps, compiled on accelerators; `call_end` as in `token_validity`."""
    method, size = prepared.method_for_steps, prepared.method_for_steps.block_size
    if prepared.geometry is not None:
        return run_on_problem(BlockProblem(inputs, size, plain, geometry=prepared.geometry), method, statistics)
    if method.is_user_method:
        return plain_selection(inputs, size, method, statistics, call_end)
    fixed = tuple([(name, value) for name, value in method.options.items() if not isinstance(value, Tensor)])
    return run_compiled(plain_selection, (method.name, fixed, statistics), inputs, size, method, statistics, call_end)


def run_in_slices(prepared: PreparedSelection, inputs: PositionedInputs, statistics: tuple[str, ...]) -> Selection:
    """Run a method in plain steps on some query rows at a time."""
    query, q_len, offset, rows = inputs.query, inputs.query.shape[2], inputs.offset, prepared.rows_per_slice
    assert rows is not None
    if offset is None:
        offset = torch.zeros(query.shape[0], dtype=torch.int32, device=query.device)
    maps = []
    for start in range(0, q_len, rows):
        part = inputs.with_fields(query=query[:, :, start : start + rows], offset=offset + start)
        keep = run_plain(prepared, part, (), offset + q_len).keep
        assert keep is not None
        maps.append(keep)
    # lists and statistics of the whole map
    whole = MapOfSlices(torch.cat(maps, 2), block_size=prepared.method_for_steps.block_size)
    return run_compiled(plain_selection, ("map", (), statistics), inputs, whole.block_size, whole, statistics, None)


@dataclass(frozen=True, eq=False)
class MapOfSlices(Method):
    """The blocks that slices of rows have chosen."""

    kept: Tensor

    def select(self, problem: BlockProblem) -> Choice:
        return from_map(problem, self.kept)


def plain_selection(
    inputs: PositionedInputs, block_size: int, method: Method, statistics: tuple[str, ...], call_end: Tensor | None
) -> Selection:
    """Cut a call into blocks and run a method on it; torch compiles both together."""
    return run_on_problem(block_problem(inputs, block_size, plain, call_end), method, statistics)


def run_on_problem(problem: BlockProblem, method: Method, statistics: tuple[str, ...]) -> Selection:
    """Run a method, and compute the wanted statistics."""
    choice = method.select(problem)
    if not isinstance(choice, Choice):
        _check_map(choice, f"method {method.name} must return", problem)
        choice = from_map(problem, choice)
    return Selection(
        choice.lists, choice.keep, compute_statistics(choice, statistics, problem), problem.block_size, None, choice.mask_mod
    )


def _check_map(kept: Any, message_start: str, problem: BlockProblem) -> None:
    """Refuse what is no map of kept blocks of this problem; messages begin with `message_start`."""
    if kept is None:
        return
    if not isinstance(kept, Tensor):
        raise TypeError(f"{message_start} a bool tensor of kept blocks, or None; got {type(kept).__name__}")
    if kept.dtype != torch.bool:
        raise TypeError(f"{message_start} kept blocks as bool; got {kept.dtype}")
    (batch, num_heads), visible = problem.inputs.query.shape[:2], problem.visible
    fits = kept.dim() == 4 and kept.shape[2:] == visible.shape[2:]
    if not fits or kept.shape[0] not in (1, batch) or kept.shape[1] not in (1, num_heads):
        expected = f"({batch} or 1, {num_heads} or 1, {visible.shape[2]}, {visible.shape[3]})"
        layout = "(batch, num_heads, num_q_blocks, num_kv_blocks)"
        raise ValueError(f"{message_start} kept blocks of {layout} = {expected}; got {tuple(kept.shape)}")
    if kept.device != visible.device:
        raise ValueError(f"{message_start} kept blocks on query's device {visible.device}; got {kept.device}")


def from_map(problem: BlockProblem, kept: Tensor | None) -> Choice:
    """The choice of a map of kept blocks; None: every visible block."""
    # materialized: both lists must come from the same floats
    limited = problem.visible if kept is None else materialized((kept | problem.diagonal_blocks) & problem.visible)
    limited = limited.expand(problem.inputs.query.shape[0], -1, -1, -1)
    return Choice(block_lists(limited, problem.visibility.full), None if kept is None else limited)
