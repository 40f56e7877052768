"""From query and key to the kept blocks: a method runs by kernels, which are launched, or in plain steps."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmask import plain
from flexmask._torch import HAS_TRITON, computed_once, is_traced, keep_static
from flexmask.base.blocks import BlockProblem, Steps, cut_into_blocks
from flexmask.base.inputs import AttentionInputs, SparseInputs, without_autocast
from flexmask.base.scores import widest_float
from flexmask.base.selection import BlockLists, Choice, Selection, block_lists
from flexmask.base.visibility import num_blocks
from flexmask.compilation import run_compiled
from flexmask.selector import METHODS, CallSelector, Selector
from flexmask.stats import FROM_LISTS, computed, empty

_PLAIN: Steps = plain
if HAS_TRITON:
    from flexmask import kernels

    _KERNELS: Steps = kernels
# float32 numbers that a method in slices of rows writes out at a time, 512 MiB; its temporaries are two or three times that
MOST_NUMBERS = 2**27


def select_blocks(
    selector: CallSelector, inputs: SparseInputs, with_map: bool = False, statistics: tuple[str, ...] = ()
) -> Selection:
    """Choose the blocks of every head, outside of autograd and autocast."""
    with torch.no_grad(), without_autocast(inputs.query.device):
        query, by_kernels = inputs.query, selector.runs_kernels(inputs.query)
        # a launch takes numbers as they are
        tensors = option_tensors(selector, query, keep_numbers=by_kernels and not is_traced())
        if by_kernels:
            run = _as_one_operator if is_traced() else run_kernels
            return run(selector, inputs, tensors, with_map, statistics)
        if query.is_cuda and not is_traced():
            for tensor in tensors.values():
                keep_static(tensor)
        if selector.row_numbers:
            rows = max(1, MOST_NUMBERS // (query.shape[0] * query.shape[1] * selector.row_numbers * selector.block_size))
            rows *= selector.block_size
            if rows < query.shape[2]:
                return _in_slices(selector, inputs, tensors, rows, with_map, statistics)
        return run_plain(selector, inputs, tensors, with_map, statistics)


def run_kernels(
    selector: Selector, inputs: SparseInputs, tensors: dict[str, Tensor], with_map: bool, statistics: tuple[str, ...]
) -> Selection:
    """Run a method by kernels; `tensors` are those of its options that are numbers (`option_tensors`)."""
    fixed = {name: value for name, value in selector.options.items() if name not in tensors}
    wants_map = with_map or any(name not in FROM_LISTS for name in statistics)
    device = inputs.query.device
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    # Triton launches on the current device
    with contextlib.nullcontext() if is_current else torch.cuda.device(device):
        edges = kernels.edges_of(inputs, selector.block_size)
        problem = BlockProblem(inputs, selector.block_size, _KERNELS, wants_map, edges)
        result = result_of(problem, selector.method.choose, fixed, tensors, statistics)
    return _finished(selector, result, with_map)


def run_plain(
    selector: Selector,
    inputs: SparseInputs,
    tensors: dict[str, Tensor],
    with_map: bool,
    statistics: tuple[str, ...],
    end: Tensor | None = None,
) -> Selection:
    """Run a method in plain steps; in a slice of rows `end` is the whole's, (batch,)."""
    fixed = {name: value for name, value in selector.options.items() if name not in tensors}
    arguments = (selector.block_size, selector.method.choose, fixed, tensors, statistics, end)
    if selector.method.is_users:
        result = plain_result(inputs, *arguments)
    else:
        result = run_compiled(plain_result, (selector.method.name, tuple(fixed.items()), statistics), inputs, *arguments)
    return _finished(selector, result, with_map)


def _in_slices(
    selector: Selector, inputs: SparseInputs, tensors: dict[str, Tensor], rows: int, with_map: bool, statistics: tuple[str, ...]
) -> Selection:
    """As `run_plain`, of `rows` query rows at a time."""
    query, q_len, first = inputs.query, inputs.query.shape[2], inputs.offset
    if first is None:
        first = torch.zeros(query.shape[0], dtype=torch.int32, device=query.device)
    maps = []
    for start in range(0, q_len, rows):
        part = inputs.with_fields(query=query[:, :, start : start + rows], offset=first + start)
        keep = run_plain(selector, part, tensors, True, (), first + q_len).keep
        assert keep is not None
        maps.append(keep)
    # lists and statistics of the whole map
    variant, kept = ("map", (), statistics), {"kept": torch.cat(maps, 2)}
    result = run_compiled(plain_result, variant, inputs, selector.block_size, from_map, {}, kept, statistics, None)
    return _finished(selector, result, with_map)


def _finished(selector: Selector, result: Selection, with_map: bool) -> Selection:
    # without a title all methods share one compiled kernel
    title = selector.method.name if result.mask_mod is not None else selector.title if with_map else None
    return result.with_fields(keep=result.keep if with_map else None, title=title)


def plain_result(
    inputs: SparseInputs,
    block_size: int,
    choose: Callable[..., Choice | Tensor | None],
    fixed: dict[str, Any],
    tensors: dict[str, Tensor],
    statistics: tuple[str, ...],
    end: Tensor | None,
) -> Selection:
    """As torch compiles it."""
    return result_of(cut_into_blocks(inputs, block_size, _PLAIN, end), choose, fixed, tensors, statistics)


def result_of(
    problem: BlockProblem,
    choose: Callable[..., Choice | Tensor | None],
    fixed: dict[str, Any],
    tensors: dict[str, Tensor],
    statistics: tuple[str, ...],
) -> Selection:
    """Run a method's function, and compute the wanted statistics."""
    choice = choose(problem, **fixed, **tensors)
    if not isinstance(choice, Choice):
        choice = from_map(problem, choice)
    return Selection(choice.lists, choice.keep, computed(choice, statistics, problem), problem.block_size, None, choice.mask_mod)


def from_map(problem: BlockProblem, kept: Tensor | None) -> Choice:
    """The choice of a map of kept blocks; None: every visible block."""
    # written to memory: both lists must come from the same floats
    limited = problem.visible if kept is None else computed_once((kept | problem.own) & problem.visible)
    limited = limited.expand(problem.inputs.query.shape[0], -1, -1, -1)
    return Choice(block_lists(limited, problem.seen.full), None if kept is None else limited)


def option_tensors(selector: CallSelector, query: Tensor, keep_numbers: bool = False) -> dict[str, Tensor]:
    """The options that are numbers as tensors in `widest_float`, so another value is not another compilation.

    Floats except 0 are 0-d, unless `keep_numbers`; shares (num_heads,) and pairs (.., 2).
    """
    method, options = selector.method, selector.options
    floats = [] if keep_numbers else [name for name in method.floats if options[name] is not None and options[name] != 0]
    # torch 2.5 cannot trace |=
    tensors = {name: _written(query.device, options[name]) for name in (*floats, *method.pairs)}
    for name in method.shares:
        share = options[name]
        if not (keep_numbers and isinstance(share, float)):
            tensors[name] = share if isinstance(share, Tensor) else _written(query.device, share, (query.shape[1],))
    return tensors


def _written(device: torch.device, value: Any, shape: tuple[int, ...] = ()) -> Tensor:
    """A number, filled into `shape`, or a tuple of numbers; the host does not wait."""
    dtype = widest_float(device)
    if not isinstance(value, tuple):
        return torch.full(shape, value, dtype=dtype, device=device)
    if device.type == "cuda" and not is_traced() and not torch.cuda.is_current_stream_capturing():
        return torch.tensor(value, dtype=dtype).to(device, non_blocking=True)
    # a captured copy would read the host's memory again
    return torch.stack([_written(device, part) for part in value])


def _as_one_operator(
    selector: Selector, inputs: SparseInputs, tensors: dict[str, Tensor], with_map: bool, statistics: tuple[str, ...]
) -> Selection:
    """A selection by kernels as an operator, apart from the graph of flex_attention (docs/design.md)."""
    fixed = {name: value for name, value in selector.options.items() if name not in tensors and value is not None}
    words = {name: value for name, value in fixed.items() if isinstance(value, str)}
    # floats that stayed numbers are 0
    integers = {name: int(value) for name, value in fixed.items() if name not in words}
    outputs = selection_operator(
        inputs.query, inputs.key, inputs.scale, inputs.softcap, inputs.window, inputs.attention_mask, inputs.offset,
        selector.method.name, selector.block_size, [*tensors, *words, *integers], list(tensors.values()), list(words.values()),
        list(integers.values()), with_map, list(statistics),
    )  # fmt: skip
    stats, title = dict(zip(statistics, outputs[5:], strict=True)), selector.title if with_map else None
    return Selection(BlockLists(*outputs[:4]), outputs[4] if with_map else None, stats, selector.block_size, title)


@torch.library.custom_op(
    "flexmask::select",
    mutates_args=(),
    schema="(Tensor query, Tensor key, float scale, float? softcap, SymInt? window, Tensor? attention_mask, Tensor? offset, "
    "str method, SymInt block_size, str[] names, Tensor[] tensors, str[] words, SymInt[] integers, bool with_map, "
    "str[] statistics) -> Tensor[]",
)
def selection_operator(
    query: Tensor,
    key: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    attention_mask: Tensor | None,
    offset: Tensor | None,
    method: str,
    block_size: int,
    names: list[str],
    tensors: list[Tensor],
    words: list[str],
    integers: list[int],
    with_map: bool,
    statistics: list[str],
) -> list[Tensor]:
    """`run_kernels` as an operator; options that `names` lacks, those of tensors, words and integers, are None."""
    given = zip(names, [*tensors, *words, *integers], strict=True)
    options = {**dict.fromkeys(METHODS[method].defaults), **dict(given)}
    inputs = AttentionInputs(query, key, None, scale, softcap, window, attention_mask, offset).with_offset()
    selector = Selector(METHODS[method], block_size, options)
    run = run_kernels if selector.runs_kernels(query) else run_plain
    selection = run(selector, inputs, dict(zip(names, tensors, strict=False)), with_map, tuple(statistics))
    keep = query.new_empty(0, dtype=torch.bool) if selection.keep is None else selection.keep
    return [*selection.lists, keep, *selection.stats.values()]


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
    return [*tensors, *empty(by_name["statistics"], query.new_empty(query.shape[:2]))]
