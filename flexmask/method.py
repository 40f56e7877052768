"""The decorator that makes a method: a mask generator and an entry of the table."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, Union, cast, get_args, get_origin, get_type_hints, overload

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.blocks import BlockProblem as BlockProblem
from flexmask.base.inputs import attention_inputs, head_groups
from flexmask.flex.block_mask import block_mask
from flexmask.select import prepare_selection, select_blocks
from flexmask.selector import METHODS, Method
from flexmask.selector import ByHead as ByHead
from flexmask.selector import PairsByHead as PairsByHead
from flexmask.stats import STATISTICS, SelectionStats, stats_of

MOST_MASK_BYTES = 16 * 2**30
# options that `flexmask.select.selection_operator` passes
_PASSED = (int, float, bool, str, type(None), ByHead, PairsByHead)
_Plans = Mapping[str, Callable[[int], PairsByHead]]
_OF_ALL = "The other parameters, the result and the errors are those of `flexprefill_mask`."


class MaskFunction(Protocol):
    """A generator of BlockMasks; its options are the method's own, by position or name."""

    __name__: str
    method: Method

    # fmt: off
    @overload
    def __call__(
        self, query: Tensor, key: Tensor, *options: Any, block_size: int = ..., scale: float | None = ...,
        softcap: float | None = ..., window: int | None = ..., attention_mask: Tensor | None = ...,
        q_offset: int | Tensor | None = ..., return_stats: Literal[False] = ..., **named: Any,
    ) -> BlockMask: ...
    @overload
    def __call__(
        self, query: Tensor, key: Tensor, *options: Any, block_size: int = ..., scale: float | None = ...,
        softcap: float | None = ..., window: int | None = ..., attention_mask: Tensor | None = ...,
        q_offset: int | Tensor | None = ..., return_stats: Literal[True], **named: Any,
    ) -> tuple[BlockMask, SelectionStats]: ...
    @overload
    def __call__(
        self, query: Tensor, key: Tensor, *options: Any, block_size: int = ..., scale: float | None = ...,
        softcap: float | None = ..., window: int | None = ..., attention_mask: Tensor | None = ...,
        q_offset: int | Tensor | None = ..., return_stats: bool = ..., **named: Any,
    ) -> Any: ...
    # fmt: on


@overload
def method(choose: Callable[..., Any], *, plans: _Plans | None = ..., **fields: Any) -> MaskFunction: ...
@overload
def method(choose: None = None, *, plans: _Plans | None = ..., **fields: Any) -> Callable[[Callable[..., Any]], MaskFunction]: ...
def method(choose: Callable[..., Any] | None = None, *, plans: _Plans | None = None, **fields: Any) -> Any:
    """Turn ``<name>_mask(problem, **options)`` into a generator of BlockMasks from query and key, and a method of that name.

    Parameters
    ----------
    choose
        From a `BlockProblem` to the kept blocks, bool, (batch or 1, num_heads or 1, num_q_blocks, num_kv_blocks), or None for
        every visible block; a call raises TypeError or ValueError for anything else.
        Invisible blocks are dropped and each row's own block is added. Options annotated as float come as 0-d tensors
        (float64 where the device has it), ByHead as (num_heads,) tensors, PairsByHead as (num_heads or 1, 2)
        tensors; 0 stays a number. Other options are compile-time constants.
    plans
        By name of a PairsByHead option: a function of num_heads that replaces None.
    fields
        Other fields of `Method`, by name.

    Returns
    -------
    callable
        ``<name>_mask(query, key, *options, block_size=128, scale=None, ...)``, checked as `flexmask.flexprefill_mask`, with the
        `Method` as its attribute ``method``. A numpydoc docstring without "Returns" gets a reference to that of flexprefill.

    Raises
    ------
    ValueError
        For a name that another function has in the table.
    TypeError
        For options of other types, if the method has kernels: an operator passes them inside ``torch.compile``.
    """
    if choose is None:
        return functools.partial(method, plans=plans, **fields)
    declared = list(inspect.signature(choose).parameters.values())[1:]
    hints = get_type_hints(choose, include_extras=True)
    accepted = {p.name: _alternatives(hints.get(p.name, Any)) for p in declared}
    for name, kinds in accepted.items() if fields.get("has_kernels") else ():
        if any(kind not in _PASSED for kind in kinds):
            raise TypeError(f"option {name} of a method with kernels must be annotated as a number, word, ByHead or PairsByHead")
    entry = Method(
        choose, {p.name: p.default for p in declared}, choose.__name__.removesuffix("_mask"),
        floats=tuple(name for name, kinds in accepted.items() if float in kinds),
        shares=tuple(name for name, kinds in accepted.items() if ByHead in kinds),
        pairs={name: (plans or {}).get(name) for name, kinds in accepted.items() if PairsByHead in kinds}, **fields,
    )  # fmt: skip
    other = METHODS.get(entry.name)
    # a module may be imported again
    if other is not None and _qualified_name(other.choose) != _qualified_name(choose):
        owner = _qualified_name(other.choose)
        raise ValueError(f"{choose.__name__} must have another name: method {entry.name!r} is that of {owner}")
    positional = [p.name for p in declared if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(choose, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def generate(
        query: Tensor,
        key: Tensor,
        *by_position: Any,
        block_size: int = 128,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        attention_mask: Tensor | None = None,
        q_offset: int | Tensor | None = None,
        return_stats: bool = False,
        **options: Any,
    ) -> Any:
        if len(by_position) > len(positional):
            raise TypeError(f"{choose.__name__} takes {len(positional)} options by position; got {len(by_position)}")
        for name, value in zip(positional[: len(by_position)], by_position, strict=True):
            if name in options:
                raise TypeError(f"{choose.__name__} got {name} twice, by position and by name")
            options[name] = value
        inputs = attention_inputs(
            query, key, scale=scale, softcap=softcap, window=window, attention_mask=attention_mask, q_offset=q_offset
        ).with_offset()
        selector = entry.checked(block_size, options).for_inputs(inputs)
        needed = query.shape[0] * query.shape[1] * selector.head_bytes(inputs)
        if needed > MOST_MASK_BYTES:
            raise ValueError(
                f"query and key need a mask of at most {MOST_MASK_BYTES / 2**30:.1f} GiB while it is made; got "
                f"{needed / 2**30:.1f} GiB. Make it for fewer heads at a time, or call sparse_attention, which does"
            )
        prepared = prepare_selection(selector, inputs)
        selection = select_blocks(prepared, inputs, with_map=True, statistics=STATISTICS if return_stats else ())
        mask = block_mask(inputs, selection)
        return (mask, stats_of([selection.stats], head_groups(query, key, None))) if return_stats else mask

    doc = inspect.getdoc(choose)
    if doc is not None and "\nReturns\n" not in doc:
        generate.__doc__ = re.sub(r"^(?=\w+\n-+$)", f"{_OF_ALL}\n\n", doc, count=1, flags=re.MULTILINE)
    # its signature is another
    del generate.__wrapped__
    common = [p for p in inspect.signature(generate).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    parameters = sorted([*common[:2], *declared, *common[2:]], key=lambda p: p.kind)
    signature = inspect.Signature(parameters, return_annotation="BlockMask | tuple[BlockMask, SelectionStats]")
    function = cast(Any, generate)
    # inspect and help() read it
    function.__signature__ = signature
    function.method = entry
    METHODS[entry.name] = entry
    return function


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The parts of an annotation: those of a union, else itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _qualified_name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
