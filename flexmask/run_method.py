"""The one place where a method runs: plain or as kernels, compiled on accelerators, uncompiled on CPUs.

Inside a surrounding ``torch.compile`` the plain steps are traced and the kernels are one operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmask import plain
from flexmask._torch import HAS_TRITON, computed_once
from flexmask.base.blocks import BlockProblem, cut_into_blocks
from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import BlockLists, Selected, Selection, block_lists
from flexmask.base.visibility import num_blocks
from flexmask.compilation import run_compiled
from flexmask.flex.mask_mods import MaskMod
from flexmask.selector import METHODS, Selector
from flexmask.stats import FROM_LISTS, computed, empty

if HAS_TRITON:
    from flexmask import kernels

Chosen = tuple[tuple[Tensor, ...], Tensor | None, tuple[Tensor, ...], MaskMod | None]


def run_method(
    selector: Selector, inputs: AttentionInputs, numbers: dict[str, Tensor], with_map: bool, statistics: tuple[str, ...]
) -> Selected:
    """Run a method on placed inputs; `numbers` are its options that are tensors, for the heads of the inputs."""
    method, by_kernels = selector.method, selector.runs_kernels(inputs.query)
    if by_kernels and torch.compiler.is_compiling():
        return _as_one_operator(selector, inputs, numbers, with_map, statistics)
    fixed = {name: value for name, value in selector.options.items() if name not in numbers}
    wants_map = with_map or any(name not in FROM_LISTS for name in statistics)
    arguments = (selector.block_size, method.choose, fixed, numbers, wants_map, statistics, by_kernels)
    if not method.compiled:
        lists, keep, stats, own = _chosen(inputs, *arguments)
    else:
        variant = (method.name, tuple(fixed.items()), wants_map, statistics)
        lists, keep, stats, own = run_compiled(_chosen, variant, inputs, *arguments, by_kernels=by_kernels)
    # without a title all methods share one compiled kernel
    title = method.name if own is not None else selector.title if with_map else None
    found = dict(zip(statistics, stats, strict=True))
    return Selected(BlockLists(*lists), keep if with_map else None, found, selector.block_size, title, own)


def _chosen(
    inputs: AttentionInputs,
    block_size: int,
    choose: Callable[..., Selection | Tensor | None],
    fixed: dict[str, Any],
    numbers: dict[str, Tensor],
    with_map: bool,
    statistics: tuple[str, ...],
    by_kernels: bool,
) -> Chosen:
    """Lists, map, statistics and mask_mod of a method's choice."""
    blocks = cut_into_blocks(inputs, block_size, kernels if by_kernels else plain, with_map)
    found = choose(blocks, **fixed, **numbers)
    if not isinstance(found, Selection):
        found = from_map(blocks, found)
    heads = (inputs.query.shape[0], inputs.query.shape[1])
    stats = computed(found, statistics, blocks.tokens, block_size, inputs.window, heads)
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
    fixed = {name: value for name, value in selector.options.items() if name not in numbers}
    words = ",".join(value for value in fixed.values() if isinstance(value, str))
    # floats that stayed numbers are 0
    integers = [-1 if value is None else int(value) for value in fixed.values() if not isinstance(value, str)]
    found = selection_operator(
        inputs.query, inputs.key, list(numbers.values()), inputs.offset, inputs.attention_mask, inputs.scale,
        inputs.softcap, inputs.window, selector.method.name, ",".join(numbers), words, [selector.block_size, *integers], with_map,
        ",".join(statistics),
    )  # fmt: skip
    stats, title = dict(zip(statistics, found[5:], strict=True)), selector.title if with_map else None
    return Selected(BlockLists(*found[:4]), found[4] if with_map else None, stats, selector.block_size, title)


@torch.library.custom_op(
    "flexmask::select",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor[] numbers, Tensor? offset, Tensor? attention_mask, float scale, float? softcap, "
    "SymInt? window, str method, str names, str words, SymInt[] integers, bool with_map, str statistics) -> Tensor[]",
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
    names: str,
    words: str,
    integers: list[int],
    with_map: bool,
    statistics: str,
) -> list[Tensor]:
    """`run_method` as an operator: `names` are the options in `numbers`, the rest stands in `words` and `integers` (-1: None)."""
    by_name = dict(zip(filter(None, names.split(",")), numbers, strict=True))
    found_words, found_integers = iter(words.split(",")), iter(integers)
    block_size = next(found_integers)
    options: dict[str, Any] = dict(by_name)
    for name, default in METHODS[method].defaults.items():
        if isinstance(default, str):
            options[name] = next(found_words)
        elif name not in by_name:
            number = next(found_integers)
            options[name] = None if number < 0 else number
    selector = Selector(METHODS[method], block_size, {name: options[name] for name in METHODS[method].defaults})
    inputs = AttentionInputs(query, key, None, scale, softcap, window, attention_mask, offset)
    found = run_method(selector, inputs, by_name, with_map, tuple(filter(None, statistics.split(","))))
    keep = query.new_empty(0, dtype=torch.bool) if found.keep is None or not with_map else found.keep
    return [*found.lists, keep, *found.stats.values()]


_OPERATOR = inspect.signature(selection_operator._init_fn)


@selection_operator.register_fake
def _(*arguments: Any) -> list[Tensor]:
    given = _OPERATOR.bind(*arguments).arguments
    query, key, block_size = given["query"], given["key"], given["integers"][0]
    rows = (*query.shape[:2], num_blocks(query.shape[2], block_size))
    blocks = (*rows, num_blocks(key.shape[2], block_size))
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [(rows, torch.int32), (blocks, torch.int32)] * 2
    shapes.append((blocks if given["with_map"] else (0,), torch.bool))
    made = [query.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    return [*made, *empty(filter(None, given["statistics"].split(",")), query.new_empty(query.shape[:2]))]
