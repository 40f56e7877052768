"""Mask functions, and the decorator that makes a method of a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, field, fields, make_dataclass
from typing import Any, Literal, Protocol, cast, get_type_hints, overload

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.blocks import BlockProblem as BlockProblem
from flexmask.base.head_groups import head_groups
from flexmask.base.inputs import attention_inputs
from flexmask.flex.block_mask import block_mask
from flexmask.method import METHODS
from flexmask.method import Method as Method
from flexmask.option_fields import ByHead as ByHead
from flexmask.option_fields import PairsByHead as PairsByHead
from flexmask.option_fields import choice_option as choice_option
from flexmask.option_fields import count_option as count_option
from flexmask.option_fields import read_fields
from flexmask.option_fields import share_option as share_option
from flexmask.selection.prepare import prepare_selection
from flexmask.selection.select import select_blocks
from flexmask.stats import STATISTICS, SelectionStats, merge_group_stats

_MAX_MASK_BYTES = 16 * 2**30


class MaskFunction(Protocol):
    """A mask function: from query and key to a BlockMask; its options are the method's own, by position or name."""

    __name__: str
    method: type[Method]

    # fmt: off
    @overload
    def __call__(
        self, query: Tensor, key: Tensor, *options: Any, block_size: int = ..., scale: float | None = ...,
        softcap: float | None = ..., window: int | None = ..., attention_mask: Tensor | None = ...,
        q_offset: int | Tensor | None = ..., prompt_len: int | None = ..., return_stats: Literal[False] = ..., **named: Any,
    ) -> BlockMask: ...
    @overload
    def __call__(
        self, query: Tensor, key: Tensor, *options: Any, return_stats: Literal[True], **named: Any
    ) -> tuple[BlockMask, SelectionStats]: ...
    @overload
    def __call__(self, query: Tensor, key: Tensor, *options: Any, return_stats: bool, **named: Any) -> Any: ...
    # fmt: on


def mask_function(name: str, cls: type[Method]) -> MaskFunction:
    """Make the mask function of a method, ``<name>_mask``, and enter the class, a dataclass, into `METHODS` under this name.

    ``<name>_mask(query, key, *options, block_size=128, scale=None, ...)`` checks its arguments as `flexmask.flexprefill_mask`
    does. It has the class's docstring, and the class as its attribute ``method``.

    Raises
    ------
    ValueError
        For a name that another class has in the table.
    TypeError
        For options of a method with kernels that no operator passes inside ``torch.compile``.
    """
    cls.name, function_name = name, f"{name}_mask"
    read_fields(cls)
    other = METHODS.get(name)
    # a module may be imported again
    if other is not None and _definition(other) != _definition(cls):
        raise ValueError(f"{function_name} must have another name: method {name!r} is that of {_definition(other)}")
    option_fields = [each for each in fields(cls) if each.name in cls.defaults]
    positional = [each.name for each in option_fields if not each.kw_only]

    def make_mask(
        query: Tensor,
        key: Tensor,
        *by_position: Any,
        block_size: int = 128,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        attention_mask: Tensor | None = None,
        q_offset: int | Tensor | None = None,
        prompt_len: int | None = None,
        return_stats: bool = False,
        **options: Any,
    ) -> Any:
        if len(by_position) > len(positional):
            raise TypeError(f"{function_name} takes {len(positional)} options by position; got {len(by_position)}")
        for option, value in zip(positional[: len(by_position)], by_position, strict=True):
            if option in options:
                raise TypeError(f"{function_name} got {option} twice, by position and by name")
            options[option] = value
        inputs = attention_inputs(
            query, key, scale=scale, softcap=softcap, window=window, attention_mask=attention_mask, q_offset=q_offset,
            prompt_len=prompt_len,
        ).with_offset()  # fmt: skip
        fitted = cls.checked(block_size, options).for_inputs(inputs)
        needed = query.shape[0] * query.shape[1] * fitted.peak_bytes_per_head(inputs)
        if needed > _MAX_MASK_BYTES:
            raise ValueError(
                f"building this mask takes {needed / 2**30:.1f} GiB, more than the limit of {_MAX_MASK_BYTES / 2**30:.0f} GiB: "
                "pass fewer heads at a time, or call sparse_attention, which groups heads itself"
            )
        prepared = prepare_selection(fitted, inputs)
        selection = select_blocks(prepared, inputs, with_map=True, statistics=STATISTICS if return_stats else ())
        mask = block_mask(inputs, selection)
        return (mask, merge_group_stats([selection.stats], head_groups(query, key, None))) if return_stats else mask

    query_parameter, key_parameter, _, *common, _ = inspect.signature(make_mask).parameters.values()
    option_parameters = [
        inspect.Parameter(
            each.name, common[0].kind if each.kw_only else query_parameter.kind, default=each.default, annotation=each.type
        )
        for each in option_fields
    ]
    function = cast(Any, make_mask)
    # inspect and help() read it
    function.__signature__ = inspect.Signature(
        [query_parameter, key_parameter, *option_parameters, *common],
        return_annotation="BlockMask | tuple[BlockMask, SelectionStats]",
    )
    function.__name__ = function.__qualname__ = function_name
    function.__module__, function.__doc__ = cls.__module__, cls.__doc__
    function.method = METHODS[name] = cls
    return cast(MaskFunction, make_mask)


def _definition(cls: type[Method]) -> str:
    """The class or function that defines a method, with its module."""
    return f"{cls.__module__}.{vars(cls).get('defined_as', cls.__qualname__)}"


def _printed(method: Method) -> str:
    """The repr of a dataclass, by the name of its class."""
    return f"{type(method).__name__}({', '.join(f'{each.name}={getattr(method, each.name)!r}' for each in fields(method))})"


def method(choose: Callable[..., Any]) -> MaskFunction:
    """Turn ``<name>_mask(problem, **options)`` into a mask function of query and key, and a method of that name.

    Parameters
    ----------
    choose
        From a `BlockProblem` to the kept blocks, bool, (batch or 1, num_heads or 1, num_q_blocks, num_kv_blocks), or None for
        every visible block; a call raises TypeError or ValueError for anything else.
        Invisible blocks are dropped, and the blocks in which rows stand are added. Options annotated as float come as 0-d
        tensors (float64 where the device has it; 0 stays a number), ByHead as (num_heads,) tensors, PairsByHead as
        (num_heads or 1, 2) tensors. Other options are constants of compiled code. Each head must choose for itself, because heads
        may come in groups; a class may set `Method.heads_decide_together`.

    Returns
    -------
    callable
        ``<name>_mask(query, key, *options, block_size=128, scale=None, ...)``, which checks its arguments as
        `flexmask.flexprefill_mask` does, and has a `Method` as its attribute ``method``, which pickles if its module has the
        function under the name ``<name>_mask``. Methods with checks of their own, or with kernels, are classes (`mask_function`).

    Raises
    ------
    ValueError
        For a name that another function has in the table.
    """
    _, *declared = inspect.signature(choose).parameters.values()
    hints = get_type_hints(choose, include_extras=True)
    options = []
    for each in declared:
        # `count_option` and others give fields
        option = each.default if isinstance(each.default, Field) else field(default=each.default)
        option.kw_only = each.kind is each.KEYWORD_ONLY
        options.append((each.name, hints.get(each.name, Any), option))
    # torch.compile (2.11) traces no function with a Field
    function = cast(Any, choose)
    function.__defaults__ = tuple(option.default for _, _, option in options if not option.kw_only)
    function.__kwdefaults__ = {name: option.default for name, _, option in options if option.kw_only}
    name = choose.__name__.removesuffix("_mask")
    body = {
        "select": lambda self, problem: choose(problem, **self.options),
        "__module__": choose.__module__,
        # where pickle finds the class
        "__qualname__": f"{choose.__qualname__.removesuffix('_mask')}_mask.method",
        "defined_as": choose.__qualname__,
        "__repr__": _printed,
        "__doc__": inspect.getdoc(choose),
    }
    cls = make_dataclass(name, options, bases=(Method,), namespace=body, frozen=True, eq=False)
    for each, (_, _, option) in zip(declared, options, strict=True):
        option.type = each.annotation  # as written, for help()
    return mask_function(name, cls)
