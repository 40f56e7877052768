"""The search of methods that write out much per query row, as many rows at a time as memory allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmask import plain
from flexmask.base.blocks import BlockProblem, cut_into_blocks
from flexmask.base.inputs import AttentionInputs
from flexmask.base.memory import map_bytes
from flexmask.base.selection import BlockLists, Selection
from flexmask.compilation import run_compiled
from flexmask.run_method import from_map

# float32 numbers that a method writes out at a time, 512 MiB; its temporaries are two or three times that
MOST_NUMBERS = 2**27


def in_row_slices(choose: Callable[..., Tensor], name: str, numbers: Callable[..., int]) -> Callable[..., Selection]:
    """`choose` over slices of rows, if a query block's choice depends only on its own rows and the keys.

    `numbers` computes the float32 numbers that `choose` writes out per query row and head.
    """

    def choose_by_rows(problem: BlockProblem, **options: Any) -> Selection:
        inputs, block_size = problem.inputs, problem.block_size
        batch, num_heads, q_len, _ = inputs.query.shape
        fixed = tuple((key, value) for key, value in options.items() if not isinstance(value, Tensor))
        of_row = batch * num_heads * max(1, numbers(inputs.key.shape[2], block_size, **options))
        rows = max(1, MOST_NUMBERS // (of_row * block_size)) * block_size
        parts = []
        for start in range(0, q_len, rows):
            some, end = (inputs, None) if rows >= q_len else _rows_of(inputs, start, rows)
            parts.append(run_compiled(_map, (name, fixed), some, block_size, choose, end, options))
        kept = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        lists, kept = run_compiled(_lists, ("lists",), inputs, block_size, kept)
        return Selection(BlockLists(*lists), kept)

    return choose_by_rows


def sliced_bytes(numbers: Callable[..., int]) -> Callable[..., int]:
    """The `head_bytes` of a method in row slices: its map, and what `numbers` counts for one block of rows."""

    def head_bytes(inputs: AttentionInputs, block_size: int, by_kernels: bool, **options: Any) -> int:
        return map_bytes(inputs, block_size) + 4 * block_size * max(1, numbers(inputs.key.shape[2], block_size, **options))

    return head_bytes


def _rows_of(inputs: AttentionInputs, start: int, rows: int) -> tuple[AttentionInputs, Tensor]:
    """The inputs of `rows` query rows from `start` on, and the position after the whole's last row, (batch,) int32."""
    batch, q_len = inputs.query.shape[0], inputs.query.shape[2]
    first = inputs.offset
    if first is None:
        first = torch.full((batch,), inputs.key.shape[2] - q_len, dtype=torch.int32, device=inputs.query.device)
    return inputs.with_fields(query=inputs.query[:, :, start : start + rows], offset=first + start), first + q_len


def _map(
    inputs: AttentionInputs, block_size: int, choose: Callable[..., Tensor], end: Tensor | None, options: dict[str, Any]
) -> Tensor:
    return choose(cut_into_blocks(inputs, block_size, plain, end=end), **options)


def _lists(inputs: AttentionInputs, block_size: int, kept: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
    found = from_map(cut_into_blocks(inputs, block_size, plain), kept)
    return tuple(found.lists), found.keep
