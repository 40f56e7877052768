"""The one place where a method runs: by kernels, which are launched, or in plain steps, compiled on accelerators only.

Inside a surrounding ``torch.compile`` the plain steps are traced and the kernels are one operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmask import plain
from flexmask._torch import HAS_TRITON, computed_once, is_traced
from flexmask.base.blocks import BlockProblem, Steps, cut_into_blocks
from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import BlockLists, Selected, Selection, block_lists
from flexmask.base.visibility import num_blocks
from flexmask.compilation import run_compiled
from flexmask.flex.mask_mods import MaskMod
from flexmask.selector import METHODS, Method, Selector
from flexmask.stats import FROM_LISTS, computed, empty

if HAS_TRITON:
    from flexmask import kernels

# float32 numbers that a method in slices of rows writes out at a time, 512 MiB; its temporaries are two or three times that
MOST_NUMBERS = 2**27

MAP = Method(lambda problem, kept: kept, {"kept": None}, "map")

# joins options that are text; no line break, because Inductor writes arguments into a comment of its code
_SEPARATOR = "\x1f"

Chosen = tuple[tuple[Tensor, ...], Tensor | None, tuple[Tensor, ...], MaskMod | None]


def run_method(
    selector: Selector,
    inputs: AttentionInputs,
    numbers: dict[str, Tensor],
    with_map: bool,
    statistics: tuple[str, ...],
    end: Tensor | None = None,
) -> Selected:
    """Run a method on inputs `with_offset`; `numbers` are its options that are tensors, for the heads of the inputs.

    For a slice of rows, `end` is the position after the whole's last row, (batch,) int32.
    """
    block_size, by_kernels = selector.block_size, selector.runs_kernels(inputs.query)
    if by_kernels and is_traced():
        return _as_one_operator(selector, inputs, numbers, with_map, statistics)
    run = selector
    if selector.row_numbers and end is None:
        batch, num_heads, q_len, _ = inputs.query.shape
        rows = max(1, MOST_NUMBERS // (batch * num_heads * selector.row_numbers * block_size)) * block_size
        if rows < q_len:
            slices = [_rows_of(inputs, start, rows) for start in range(0, q_len, rows)]
            maps = [run_method(selector, part, numbers, True, (), end).keep for part, end in slices]
            run, numbers = Selector(MAP, block_size, MAP.defaults), {"kept": torch.cat([x for x in maps if x is not None], 2)}
    fixed = {name: value for name, value in run.options.items() if name not in numbers}
    # the plain steps make it in any case
    wants_map = not by_kernels or with_map or any(name not in FROM_LISTS for name in statistics)
    arguments = (block_size, run.method.choose, fixed, numbers, wants_map, statistics, by_kernels, end)
    if by_kernels and inputs.query.is_cuda:
        with torch.cuda.device(inputs.query.device):  # where Triton launches
            lists, keep, stats, own = _chosen(inputs, *arguments)
    elif by_kernels or selector.method.is_users:
        lists, keep, stats, own = _chosen(inputs, *arguments)
    else:
        variant = (run.method.name, tuple(fixed.items()), wants_map, statistics)
        lists, keep, stats, own = run_compiled(_chosen, variant, inputs, *arguments)
    # without a title all methods share one compiled kernel
    title = selector.method.name if own is not None else selector.title if with_map else None
    found = dict(zip(statistics, stats, strict=True))
    return Selected(BlockLists(*lists), keep if with_map else None, found, block_size, title, own)


def _rows_of(inputs: AttentionInputs, start: int, rows: int) -> tuple[AttentionInputs, Tensor]:
    """The inputs of `rows` query rows from `start` on, and the position after the whole's last row."""
    batch, q_len = inputs.query.shape[0], inputs.query.shape[2]
    first = inputs.offset
    if first is None:
        first = torch.full((batch,), inputs.key.shape[2] - q_len, dtype=torch.int32, device=inputs.query.device)
    return inputs.with_fields(query=inputs.query[:, :, start : start + rows], offset=first + start), first + q_len


def _chosen(
    inputs: AttentionInputs,
    block_size: int,
    choose: Callable[..., Selection | Tensor | None],
    fixed: dict[str, Any],
    numbers: dict[str, Tensor],
    with_map: bool,
    statistics: tuple[str, ...],
    by_kernels: bool,
    end: Tensor | None,
) -> Chosen:
    """Lists, map, statistics and mask_mod of a method's choice."""
    steps: Steps = plain
    if by_kernels:
        steps = kernels
    blocks = cut_into_blocks(inputs, block_size, steps, with_map, end)
    found = choose(blocks, **fixed, **numbers)
    if not isinstance(found, Selection):
        found = from_map(blocks, found)
    stats = computed(found, statistics, blocks)
    return tuple(found.lists), found.keep, stats, found.mask_mod


def from_map(blocks: BlockProblem, kept: Tensor | None) -> Selection:
    """The selection of a map of kept blocks; None: every visible block."""
    # written to memory: both lists must come from the same floats
    limited = blocks.visible if kept is None else computed_once((kept | blocks.own) & blocks.visible)
    limited = limited.expand(blocks.inputs.query.shape[0], -1, -1, -1)
    return Selection(block_lists(limited, blocks.seen.full), None if kept is None else limited)


def _as_one_operator(
    selector: Selector, inputs: AttentionInputs, numbers: dict[str, Tensor], with_map: bool, statistics: tuple[str, ...]
) -> Selected:
    """A selection by kernels as an operator that a surrounding compilation does not look into.

    Traced into one graph with flex_attention, our kernels gave wrong results (torch 2.11 apparently does not order its reads).
    """
    fixed = {name: value for name, value in selector.options.items() if name not in numbers and value is not None}
    words = _SEPARATOR.join(f"{name}={value}" for name, value in fixed.items() if isinstance(value, str))
    # floats that stayed numbers are 0
    integers = {name: int(value) for name, value in fixed.items() if not isinstance(value, str)}
    found = selection_operator(
        inputs.query, inputs.key, list(numbers.values()), inputs.offset, inputs.attention_mask, inputs.scale,
        inputs.softcap, inputs.window, selector.method.name, selector.block_size, ",".join(numbers), words,
        ",".join(integers), list(integers.values()), with_map, ",".join(statistics),
    )  # fmt: skip
    stats, title = dict(zip(statistics, found[5:], strict=True)), selector.title if with_map else None
    return Selected(BlockLists(*found[:4]), found[4] if with_map else None, stats, selector.block_size, title)


@torch.library.custom_op(
    "flexmask::select",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor[] numbers, Tensor? offset, Tensor? attention_mask, float scale, float? softcap, "
    "SymInt? window, str method, SymInt block_size, str number_names, str words, str integer_names, SymInt[] integers, "
    "bool with_map, str statistics) -> Tensor[]",
)
def selection_operator(
    query: Tensor,
    key: Tensor,
    numbers: list[Tensor],
    offset: Tensor | None,
    attention_mask: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    method: str,
    block_size: int,
    number_names: str,
    words: str,
    integer_names: str,
    integers: list[int],
    with_map: bool,
    statistics: str,
) -> list[Tensor]:
    """`run_method` as an operator; options without a name in `number_names`, `words` and `integer_names` are None."""
    by_name = dict(zip(filter(None, number_names.split(",")), numbers, strict=True))
    options: dict[str, Any] = dict.fromkeys(METHODS[method].defaults)
    options |= dict(line.split("=", 1) for line in filter(None, words.split(_SEPARATOR)))
    options |= dict(zip(filter(None, integer_names.split(",")), integers, strict=True)) | by_name
    inputs = AttentionInputs(query, key, None, scale, softcap, window, attention_mask, offset)
    selector = Selector(METHODS[method], block_size, options)
    found = run_method(selector, inputs, by_name, with_map, tuple(filter(None, statistics.split(","))))
    keep = query.new_empty(0, dtype=torch.bool) if found.keep is None or not with_map else found.keep
    return [*found.lists, keep, *found.stats.values()]


_OPERATOR = inspect.signature(selection_operator._init_fn)


@selection_operator.register_fake
def _(*arguments: Any) -> list[Tensor]:
    given = _OPERATOR.bind(*arguments).arguments
    query, key, block_size = given["query"], given["key"], given["block_size"]
    rows = (*query.shape[:2], num_blocks(query.shape[2], block_size))
    blocks = (*rows, num_blocks(key.shape[2], block_size))
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [(rows, torch.int32), (blocks, torch.int32)] * 2
    shapes.append((blocks if given["with_map"] else (0,), torch.bool))
    made = [query.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    return [*made, *empty(filter(None, given["statistics"].split(",")), query.new_empty(query.shape[:2]))]
