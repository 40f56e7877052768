"""A selection by kernels as an operator, which torch.compile keeps apart from flex_attention (docs/design.md)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from flexmask.base.inputs import AttentionInputs, PositionedInputs
from flexmask.base.selection import BlockLists, Selection
from flexmask.base.visibility import num_blocks
from flexmask.method import METHODS, FittedMethod
from flexmask.selection.prepare import PreparedSelection, with_device_numbers
from flexmask.selection.run import run_kernels
from flexmask.stats import empty_statistics


def run_operator(prepared: PreparedSelection, inputs: PositionedInputs, with_map: bool, statistics: tuple[str, ...]) -> Selection:
    """Run a method by kernels in a graph that torch traces."""
    method = prepared.method
    # a plan that was made before the compilation has numbers
    for_steps = with_device_numbers(method, inputs.query, keep_numbers=False)
    options = {name: value for name, value in for_steps.options.items() if value is not None}
    tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
    words = {name: value for name, value in options.items() if isinstance(value, str)}
    # floats that stayed numbers are 0
    integers = {name: int(value) for name, value in options.items() if name not in tensors and name not in words}
    outputs = selection_operator(
        inputs.query, inputs.key, inputs.scale, inputs.softcap, inputs.window, inputs.attention_mask, inputs.offset,
        inputs.prompt_len, method.name, method.block_size, [*tensors, *words, *integers], list(tensors.values()),
        list(words.values()), list(integers.values()), with_map, list(statistics),
    )  # fmt: skip
    stats = dict(zip(statistics, outputs[5:], strict=True))
    return Selection(BlockLists(*outputs[:4]), outputs[4] if with_map else None, stats, method.block_size)


@torch.library.custom_op(
    "flexmask::select",
    mutates_args=(),
    schema="(Tensor query, Tensor key, float scale, float? softcap, SymInt? window, Tensor? attention_mask, Tensor? offset, "
    "SymInt? prompt_len, str method, SymInt block_size, str[] names, Tensor[] tensors, str[] words, SymInt[] integers, "
    "bool with_map, str[] statistics) -> Tensor[]",
)
def selection_operator(
    query: Tensor,
    key: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    attention_mask: Tensor | None,
    offset: Tensor | None,
    prompt_len: int | None,
    method: str,
    block_size: int,
    names: list[str],
    tensors: list[Tensor],
    words: list[str],
    integers: list[int],
    with_map: bool,
    statistics: list[str],
) -> list[Tensor]:
    """`run_kernels` as an operator. `names` name the options in tensors, words and integers; all other options are None."""
    values = zip(names, [*tensors, *words, *integers], strict=True)
    options = {**dict.fromkeys(METHODS[method].defaults), **dict(values)}
    geometry = AttentionInputs(query, key, None, scale, softcap, window, attention_mask, offset, prompt_len=prompt_len)
    fitted = FittedMethod(METHODS[method].unchecked(block_size=block_size, **options))
    prepared = PreparedSelection(fitted, fitted, True)
    selection = run_kernels(prepared, geometry.with_offset(), with_map, tuple(statistics))
    keep = selection.keep if with_map else None
    return [*selection.lists, query.new_empty(0, dtype=torch.bool) if keep is None else keep, *selection.stats.values()]


_OPERATOR = inspect.signature(selection_operator._init_fn)


@selection_operator.register_fake
def _(*arguments: Any) -> list[Tensor]:
    by_name = _OPERATOR.bind(*arguments).arguments
    query, key, block_size = by_name["query"], by_name["key"], by_name["block_size"]
    rows = (*query.shape[:2], num_blocks(query.shape[2], block_size))
    blocks = (*rows, num_blocks(key.shape[2], block_size))
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [(rows, torch.int32), (blocks, torch.int32)] * 2
    shapes.append((blocks if by_name["with_map"] else (0,), torch.bool))
    tensors = [query.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    return [*tensors, *empty_statistics(by_name["statistics"], query.new_empty(query.shape[:2]))]
