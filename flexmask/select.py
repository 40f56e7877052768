"""From query and key to the kept blocks: a method runs by kernels, which are launched, or in plain steps."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexmask import plain
from flexmask._torch import HAS_TRITON, computed_once, is_traced, keep_static, on_device
from flexmask.base.blocks import BlockProblem, cut_into_blocks
from flexmask.base.inputs import AttentionInputs, SparseInputs, without_autocast
from flexmask.base.scores import widest_float
from flexmask.base.selection import BlockLists, Choice, Selection, block_lists
from flexmask.base.visibility import BlockVisibility, Tokens, num_blocks
from flexmask.compilation import run_compiled, runs_uncompiled
from flexmask.selector import METHODS, FittedMethod, Method
from flexmask.stats import FROM_LISTS, computed, empty

if HAS_TRITON:
    from flexmask import kernels
    from flexmask.kernels.repeat import Repeats
if TYPE_CHECKING:
    from flexmask.kernels.visibility import Edges

# float32 numbers that a method in slices of rows writes out at a time, 512 MiB; its temporaries are two or three times that
MOST_NUMBERS = 2**27


class PreparedSelection(NamedTuple):
    """The part of a selection that no layer's numbers change."""

    selector: FittedMethod
    selector_for_steps: Method  # the same with options as its steps take them (`with_device_numbers`)
    by_kernels: bool
    rows: int | None = None  # of a slice, for a method in slices of rows
    # the geometry, for kernels and for plain steps; None: computed with the selection
    edges: Edges | None = None
    cut: tuple[Tokens, BlockVisibility] | None = None
    repeats: Repeats | None = None  # of the launches


def prepare_selection(
    selector: FittedMethod, inputs: SparseInputs, like: PreparedSelection | None = None, most_numbers: int = MOST_NUMBERS
) -> PreparedSelection:
    """The parts of selections of such inputs that are computed once; `like` is that of other heads of the same batch rows."""
    query, size, by_kernels = inputs.query, selector.block_size, selector.runs_kernels(inputs.query)
    with torch.no_grad(), without_autocast(query.device):
        if is_traced() and by_kernels:
            return PreparedSelection(selector, selector, True)
        # a launch takes numbers as they are
        for_steps = with_device_numbers(selector, query, keep_numbers=by_kernels)
        if by_kernels:
            edges = None if like is None else like.edges
            return PreparedSelection(selector, for_steps, True, edges=edges or _edges(inputs, size))
        numbers = selector.row_numbers(inputs.key.shape[2])
        if numbers:
            rows = max(1, most_numbers // (query.shape[0] * query.shape[1] * numbers * size)) * size
            if rows < query.shape[2]:
                return PreparedSelection(selector, for_steps, False, rows)
        cut = None if like is None else like.cut
        # compiled steps compute the geometry in one graph with the rest
        if cut is None and runs_uncompiled(query) and not is_traced():
            cut = cut_into_blocks(inputs, size, plain).cut
        return PreparedSelection(selector, for_steps, False, cut=cut)


def select_blocks(
    prepared: PreparedSelection, inputs: SparseInputs, with_map: bool = False, statistics: tuple[str, ...] = ()
) -> Selection:
    """Choose the blocks of every head, outside of autograd and autocast."""
    selector, query = prepared.selector, inputs.query
    with torch.no_grad(), without_autocast(query.device):
        if prepared.by_kernels:
            result = (_as_one_operator if is_traced() else run_kernels)(prepared, inputs, with_map, statistics)
        else:
            result = (run_plain if prepared.rows is None else _in_slices)(prepared, inputs, statistics)
        if not with_map and result.mask_mod is None:
            # without a map and a title all methods share one compiled kernel
            return result if result.keep is None else result.with_fields(keep=None)
        title = selector.name if result.mask_mod is not None else selector.title
        return result.with_fields(keep=result.keep if with_map else None, title=title)


def with_device_numbers(selector: FittedMethod, query: Tensor, keep_numbers: bool) -> Method:
    """The selector with numbers as tensors in `widest_float`, so that another value is not another compilation.

    Floats except 0 are 0-d, unless `keep_numbers`; shares (num_heads,) and pairs (.., 2).
    """
    options, tensors = selector.options, {}
    floats = [] if keep_numbers else [name for name in selector.floats if options[name] is not None and options[name] != 0]
    for name in (*floats, *selector.pairs, *selector.by_head):
        value = options[name]
        if keep_numbers and isinstance(value, float):
            continue
        if not isinstance(value, Tensor):
            value = _written(query.device, value, (query.shape[1],) if name in selector.by_head else ())
        if query.is_cuda and not keep_numbers and not is_traced():
            keep_static(value)
        tensors[name] = value
    return selector.with_options(**tensors)


def _written(device: torch.device, value: Any, shape: tuple[int, ...] = ()) -> Tensor:
    """A number, filled into `shape`, or a tuple of numbers; the host does not wait."""
    dtype = widest_float(device)
    if not isinstance(value, tuple):
        return torch.full(shape, value, dtype=dtype, device=device)
    if device.type == "cuda" and not is_traced() and not torch.cuda.is_current_stream_capturing():
        return torch.tensor(value, dtype=dtype).to(device, non_blocking=True)
    # a captured copy would read the host's memory again
    return torch.stack([_written(device, part) for part in value])


def repeating(prepared: PreparedSelection) -> PreparedSelection:
    """The same, which notes the launches of one selection and repeats them in later ones."""
    return prepared._replace(repeats=Repeats()) if prepared.by_kernels and prepared.selector_for_steps.only_launches else prepared


def _edges(inputs: SparseInputs, block_size: int) -> Edges:
    with on_device(inputs.query.device):
        return kernels.edges_of(inputs, block_size)


def run_kernels(prepared: PreparedSelection, inputs: SparseInputs, with_map: bool, statistics: tuple[str, ...]) -> Selection:
    """Run a method by kernels."""
    size = prepared.selector_for_steps.block_size
    wants_map = with_map or any(name not in FROM_LISTS for name in statistics)
    with on_device(inputs.query.device):
        edges = prepared.edges or kernels.edges_of(inputs, size)
        problem = BlockProblem(inputs, size, kernels, wants_map, edges)
        if prepared.repeats is None or wants_map or statistics:
            return result_of(problem, prepared.selector_for_steps, statistics)
        lists = prepared.repeats.lists(inputs, lambda: result_of(problem, prepared.selector_for_steps, ()).lists)
        return Selection(lists, None, {}, size)


def run_plain(
    prepared: PreparedSelection, inputs: SparseInputs, statistics: tuple[str, ...], end: Tensor | None = None
) -> Selection:
    """Run a method in plain steps, compiled on accelerators; in a slice of rows `end` is the whole's, (batch,)."""
    selector, size = prepared.selector_for_steps, prepared.selector_for_steps.block_size
    if prepared.cut is not None:
        return result_of(BlockProblem(inputs, size, plain, cut=prepared.cut), selector, statistics)
    if selector.is_users:
        return plain_result(inputs, size, selector, statistics, end)
    fixed = tuple([(name, value) for name, value in selector.options.items() if not isinstance(value, Tensor)])
    return run_compiled(plain_result, (selector.name, fixed, statistics), inputs, size, selector, statistics, end)


def _in_slices(prepared: PreparedSelection, inputs: SparseInputs, statistics: tuple[str, ...]) -> Selection:
    """As `run_plain`, of some query rows at a time."""
    query, q_len, first, rows = inputs.query, inputs.query.shape[2], inputs.offset, prepared.rows
    assert rows is not None
    if first is None:
        first = torch.zeros(query.shape[0], dtype=torch.int32, device=query.device)
    maps = []
    for start in range(0, q_len, rows):
        part = inputs.with_fields(query=query[:, :, start : start + rows], offset=first + start)
        keep = run_plain(prepared, part, (), first + q_len).keep
        assert keep is not None
        maps.append(keep)
    # lists and statistics of the whole map
    whole = MapOfSlices(torch.cat(maps, 2), block_size=prepared.selector_for_steps.block_size)
    return run_compiled(plain_result, ("map", (), statistics), inputs, whole.block_size, whole, statistics, None)


@dataclass(frozen=True, eq=False)
class MapOfSlices(Method):
    """The blocks that slices of rows have chosen."""

    kept: Tensor

    def select(self, problem: BlockProblem) -> Choice:
        return from_map(problem, self.kept)


def plain_result(
    inputs: SparseInputs, block_size: int, selector: Method, statistics: tuple[str, ...], end: Tensor | None
) -> Selection:
    """As torch compiles it."""
    return result_of(cut_into_blocks(inputs, block_size, plain, end), selector, statistics)


def result_of(problem: BlockProblem, selector: Method, statistics: tuple[str, ...]) -> Selection:
    """Run a method, and compute the wanted statistics."""
    choice = selector.select(problem)
    if not isinstance(choice, Choice):
        _check_map(choice, f"method {selector.name} must give", problem)
        choice = from_map(problem, choice)
    return Selection(choice.lists, choice.keep, computed(choice, statistics, problem), problem.block_size, None, choice.mask_mod)


def _check_map(kept: Any, must_give: str, problem: BlockProblem) -> None:
    """Refuse what is no map of kept blocks of this problem."""
    if kept is None:
        return
    if not isinstance(kept, Tensor):
        raise TypeError(f"{must_give} a bool tensor of kept blocks, or None; got {type(kept).__name__}")
    if kept.dtype != torch.bool:
        raise TypeError(f"{must_give} kept blocks as bool; got {kept.dtype}")
    (batch, num_heads), visible = problem.inputs.query.shape[:2], problem.visible
    fits = kept.dim() == 4 and kept.shape[2:] == visible.shape[2:]
    if not fits or kept.shape[0] not in (1, batch) or kept.shape[1] not in (1, num_heads):
        expected = f"({batch} or 1, {num_heads} or 1, {visible.shape[2]}, {visible.shape[3]})"
        layout = "(batch, num_heads, num_q_blocks, num_kv_blocks)"
        raise ValueError(f"{must_give} kept blocks of {layout} = {expected}; got {tuple(kept.shape)}")
    if kept.device != visible.device:
        raise ValueError(f"{must_give} kept blocks on query's device {visible.device}; got {kept.device}")


def from_map(problem: BlockProblem, kept: Tensor | None) -> Choice:
    """The choice of a map of kept blocks; None: every visible block."""
    # written to memory: both lists must come from the same floats
    limited = problem.visible if kept is None else computed_once((kept | problem.own) & problem.visible)
    limited = limited.expand(problem.inputs.query.shape[0], -1, -1, -1)
    return Choice(block_lists(limited, problem.seen.full), None if kept is None else limited)


def _as_one_operator(prepared: PreparedSelection, inputs: SparseInputs, with_map: bool, statistics: tuple[str, ...]) -> Selection:
    """A selection by kernels as an operator, apart from the graph of flex_attention (docs/design.md)."""
    selector = prepared.selector
    # a plan that was made before the compilation has numbers
    for_steps = with_device_numbers(selector, inputs.query, keep_numbers=False)
    given = {name: value for name, value in for_steps.options.items() if value is not None}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    words = {name: value for name, value in given.items() if isinstance(value, str)}
    # floats that stayed numbers are 0
    integers = {name: int(value) for name, value in given.items() if name not in tensors and name not in words}
    outputs = selection_operator(
        inputs.query, inputs.key, inputs.scale, inputs.softcap, inputs.window, inputs.attention_mask, inputs.offset,
        inputs.prompt_len, selector.name, selector.block_size, [*tensors, *words, *integers], list(tensors.values()),
        list(words.values()), list(integers.values()), with_map, list(statistics),
    )  # fmt: skip
    stats = dict(zip(statistics, outputs[5:], strict=True))
    return Selection(BlockLists(*outputs[:4]), outputs[4] if with_map else None, stats, selector.block_size)


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
    """`run_kernels` as an operator; options that `names` lacks, those of tensors, words and integers, are None."""
    given = zip(names, [*tensors, *words, *integers], strict=True)
    options = {**dict.fromkeys(METHODS[method].defaults), **dict(given)}
    geometry = AttentionInputs(query, key, None, scale, softcap, window, attention_mask, offset, prompt_len=prompt_len)
    inputs = geometry.with_offset()
    made, wanted = METHODS[method].unchecked(block_size=block_size, **options), tuple(statistics)
    prepared = PreparedSelection(FittedMethod(made), made, made.runs_kernels(query))
    selection = run_kernels(prepared, inputs, with_map, wanted) if prepared.by_kernels else run_plain(prepared, inputs, wanted)
    keep = selection.keep if with_map and selection.keep is not None else query.new_empty(0, dtype=torch.bool)
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
