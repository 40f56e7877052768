"""A method of the gallery: its options, and its masks of checked problems, made in slices that bound memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import in_dispatch_mode, widest_float, with_dynamic, without_autocast, without_tf32
from flexmask.base.inputs import AttentionInputs, HeadGroup
from flexmask.base.option_checks import pairs_by_head
from flexmask.base.search_result import BlockLists
from flexmask.base.visibility import Tokens, block_visibility, num_blocks, token_validity
from flexmask.block_problem import BlockProblem
from flexmask.compilation import compiled
from flexmask.config import FlexPrefillConfig
from flexmask.flex.block_mask import block_mask
from flexmask.flex.head_groups import head_groups
from flexmask.plain.block_lists import block_lists

Keep = Callable[..., "Tensor | None"]
MakePlan = Callable[[int], "tuple[tuple[float, float], ...]"]
# float32 numbers that a method writes out at a time, 512 MiB of them; its largest temporaries are two or three times that
MOST_NUMBERS = 2**27
# bytes that each pair of blocks takes while its lists are made, uncompiled: int64 places, int32 sums and lists, bool maps
PAIR_BYTES = 40


@dataclass(frozen=True)
class Method:
    """A method of the gallery: the function that keeps blocks, and what the core has to know to call it.

    Attributes
    ----------
    keep
        From a `BlockProblem` and the options to the kept blocks.
    defaults
        Its own options by name, with their defaults.
    floats
        Those that `keep` gets as 0-d tensors, so that another value is not another compilation.
    check
        Called with the options before anything is computed; raises for wrong ones. None: there is nothing to check.
    numbers
        From kv_len, block_size and the options to the float32 numbers that `keep` writes out for each head, or, of a method
        `by_rows`, for each query row of a head. None: no more than a map of blocks.
    by_rows
        True if a query block's kept blocks depend on its own rows and on the keys alone, so that slices of rows can be searched.
    plans
        Options that are pairs of numbers by query head, and the function of num_heads that makes one in the place of None. `keep`
        gets them as (num_heads or 1, 2) tensors.
    shared
        True if the heads decide together, so that none can be left out.
    """

    keep: Keep
    defaults: dict[str, Any]
    floats: tuple[str, ...]
    check: Callable[..., None] | None
    numbers: Callable[..., int] | None
    by_rows: bool
    plans: dict[str, MakePlan | None]
    shared: bool

    @property
    def name(self) -> str:
        """Its name in the registry."""
        return self.keep.__name__.removesuffix("_mask")

    @property
    def of_all_heads(self) -> bool:
        """True if it has to see all heads of a batch row: it has a plan by head, or decides for all heads together."""
        return bool(self.plans) or self.shared

    def check_options(self, block_size: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options, defaults filled in, or an error for wrong ones; of plans only the type is left to look at."""
        FlexPrefillConfig(block_size=block_size)  # for its range
        unknown = [name for name in options if name not in self.defaults]
        if unknown:
            known = ", ".join(self.defaults) or "of every mask only"
            raise TypeError(f"{self.name} takes the options {known}; got {unknown[0]!r}")
        filled = {**self.defaults, **options}
        if self.check is not None:
            self.check(block_size=block_size, **filled)
        return filled

    def checked(self, num_heads: int, block_size: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """`check_options`, with plans for so many query heads."""
        filled = self.check_options(block_size, options)
        for name, make_plan in self.plans.items():
            given = make_plan(num_heads) if make_plan is not None and filled[name] is None else filled[name]
            filled[name] = pairs_by_head(name, given, num_heads)
        return filled

    def mask(
        self,
        inputs: AttentionInputs,
        block_size: int,
        options: dict[str, Any],
        title: str | None = None,
        with_keep: bool = True,
        by_head: bool = False,
    ) -> BlockMask:
        """The mask of a placed problem, with options of `checked`.

        Its mask_mod holds the block choice only `with_keep`. Where the heads agree it has one head, unless asked for `by_head`.
        """
        with torch.no_grad(), without_autocast(inputs.query.device), _exact_products(inputs.query):
            detached = inputs.detached()
            kept, selects = kept_blocks(self, detached, block_size, _on_device(self, options, inputs.query.device))
            kept = kept.expand(inputs.query.shape[0], inputs.query.shape[1] if by_head else -1, -1, -1)
            lists = _run(_lists, ("lists",), detached, block_size, kept)
        return block_mask(inputs, BlockLists(*lists), kept if with_keep and selects else None, block_size, title)


def kept_blocks(method: Method, inputs: AttentionInputs, block_size: int, options: dict[str, Any]) -> tuple[Tensor, bool]:
    """The kept blocks of a placed problem, (batch or 1, num_heads or 1, num_q_blocks, num_kv_blocks) bool; False if all visible.

    Heads and, of a method that allows it, slices of rows follow one another where all at once would take too much memory.
    """
    groups, rows = _slices(method, inputs, block_size, options)
    q_len = inputs.query.shape[2]
    if len(groups) == 1 and rows >= q_len:
        return _kept(method, inputs, None, block_size, options)
    batch, num_heads = inputs.query.shape[:2]
    shape = (batch, num_heads, num_blocks(q_len, block_size), num_blocks(inputs.key.shape[2], block_size))
    kept = torch.empty(shape, dtype=torch.bool, device=inputs.query.device)
    for group in groups:
        part = inputs.of_heads(group)
        own = {name: value[group.query] if name in method.plans and len(value) > 1 else value for name, value in options.items()}
        for start in range(0, q_len, rows):
            blocks = slice(start // block_size, num_blocks(min(start + rows, q_len), block_size))
            some, end = (part, None) if rows >= q_len else _rows_of(part, start, rows)
            kept[group.batch, group.query, blocks] = _kept(method, some, end, block_size, own)[0]
    return kept, True


def _slices(method: Method, inputs: AttentionInputs, block_size: int, options: dict[str, Any]) -> tuple[list[HeadGroup], int]:
    """Groups of heads, and the number of rows that are searched at a time, a multiple of the block or all of them."""
    (batch, num_heads, q_len, _), num_kv_heads = inputs.query.shape, inputs.key.shape[1]
    everything = [HeadGroup(slice(0, batch), slice(0, num_heads), slice(0, num_kv_heads))]
    if method.numbers is None:
        return everything, q_len
    numbers = max(1, method.numbers(inputs.key.shape[2], block_size, **options))
    least = block_size if method.by_rows else 1
    at_once = MOST_NUMBERS // (least * numbers)
    groups = everything if at_once >= batch * num_heads else head_groups(batch, num_heads, num_kv_heads, at_once)
    if not method.by_rows:
        return groups, q_len
    heads = batch * num_heads // len(groups)
    return groups, max(1, MOST_NUMBERS // (heads * numbers * block_size)) * block_size


def _rows_of(inputs: AttentionInputs, start: int, rows: int) -> tuple[AttentionInputs, Tensor]:
    """The problem of `rows` query rows from `start` on, and the position after the last row of the whole, (batch,) int32."""
    batch, q_len = inputs.query.shape[0], inputs.query.shape[2]
    first = inputs.offset
    if first is None:
        first = torch.full((batch,), inputs.key.shape[2] - q_len, dtype=torch.int32, device=inputs.query.device)
    some = inputs.with_query(inputs.query[:, :, start : start + rows])
    return some.with_fields(offset=first + start), first + q_len


def _exact_products(query: Tensor) -> contextlib.AbstractContextManager[None]:
    """Float32 products without TF32 where the device has it."""
    return without_tf32() if query.is_cuda and not torch.compiler.is_compiling() else contextlib.nullcontext()


def _on_device(method: Method, options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The options with floats as 0-d tensors and plans as (num_heads or 1, 2) tensors."""
    made = dict(options)
    for name, value in options.items():
        if name in method.plans:
            made[name] = _plan(value, device)
        elif name in method.floats and value is not None:
            made[name] = torch.full((), value, dtype=widest_float(device), device=device)
    return made


def _plan(pairs: tuple[tuple[float, float], ...], device: torch.device) -> Tensor:
    """`pairs` on `device`; on CUDA those of earlier calls, since a copy from the host waits for it."""
    kept = device.type == "cuda" and not torch.compiler.is_compiling()
    # what a mode made must not outlive it
    if not kept or in_dispatch_mode():
        return torch.tensor(pairs, dtype=widest_float(device), device=device)
    return _kept_plan(pairs, device, torch.is_inference_mode_enabled())


@functools.lru_cache(maxsize=256)
def _kept_plan(pairs: tuple[tuple[float, float], ...], device: torch.device, inference: bool) -> Tensor:
    return torch.tensor(pairs, dtype=torch.float64, device=device)


def _kept(
    method: Method, inputs: AttentionInputs, end: Tensor | None, block_size: int, options: dict[str, Any]
) -> tuple[Tensor, bool]:
    fixed = tuple((name, value) for name, value in options.items() if not isinstance(value, Tensor))
    found: tuple[Tensor, bool] = _run(_limited, (method.name, method.keep, fixed), inputs, block_size, method.keep, end, options)
    return found


def runs_uncompiled(query: Tensor) -> bool:
    """True on CPUs, where a compilation takes longer than it saves, and inside a surrounding one, which compiles the whole."""
    return query.device.type == "cpu" or torch.compiler.is_compiling()


def _run(
    function: Callable[..., Any], variant: tuple[Hashable, ...], inputs: AttentionInputs, block_size: int, *rest: Any
) -> Any:
    """Call ``function(inputs, block_size, *rest)``, compiled on accelerators, as `flexmask.search` runs its own steps."""
    query, key = inputs.query, inputs.key
    # what the search has no use for must not tell one compilation from another
    bare = inputs.with_fields(value=None, sinks=None, deciding=None, gamma=None)
    if runs_uncompiled(query):
        return function(bare, block_size, *rest)
    batch, num_heads, q_len, head_dim = query.shape
    where = (query.device.type, query.device.index, query.dtype)
    shape = (batch == 1, num_heads, key.shape[1], q_len == key.shape[2], head_dim, block_size)
    scores = (inputs.scale, inputs.softcap, inputs.window)
    given = (*scores, *(x is None for x in (inputs.offset, inputs.attention_mask, *rest)))
    run = compiled(function, *variant, *where, *shape, *given)
    mask = None if inputs.attention_mask is None else with_dynamic(inputs.attention_mask, 1)
    dynamic = bare.with_fields(query=with_dynamic(query, 2), key=with_dynamic(key, 2), attention_mask=mask)
    return run(dynamic, block_size, *rest)


def _tokens(inputs: AttentionInputs, end: Tensor | None) -> Tokens:
    """Validity of the tokens; keys up to `end` are filled, though the rows here may stop before."""
    q_len, kv_len = inputs.query.shape[2], inputs.key.shape[2]
    tokens = token_validity(q_len, kv_len, inputs.offset, inputs.attention_mask, inputs.key)
    if end is None:
        return tokens
    key_valid = torch.arange(kv_len, device=end.device) < end.unsqueeze(-1)
    if inputs.attention_mask is not None:
        key_valid = key_valid & inputs.attention_mask
    return Tokens(tokens.offset, key_valid, tokens.row_valid, tokens.padded, tokens.filled)


def _limited(
    inputs: AttentionInputs, block_size: int, keep: Keep, end: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, bool]:
    """The blocks that `keep` keeps, with those of the rows' own positions, without those that hold no visible pair.

    False comes with them where the method keeps every visible block.
    """
    tokens = _tokens(inputs, end)
    problem = BlockProblem(inputs, block_size, tokens, block_visibility(tokens, block_size, inputs.window))
    chosen = keep(problem, **options)
    if chosen is None:
        return problem.visible, False
    return (chosen | problem.own) & problem.visible, True


def _lists(inputs: AttentionInputs, block_size: int, kept: Tensor) -> tuple[Tensor, ...]:
    """The index lists of kept blocks."""
    return tuple(block_lists(kept, block_visibility(_tokens(inputs, None), block_size, inputs.window).full))
