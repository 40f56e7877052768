"""A method chooses blocks: a frozen dataclass whose fields are its options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NewType, TypeVar, cast

from torch import Tensor

from flexmask._torch import HAS_TRITON, has_real_storage, is_traced
from flexmask.base.blocks import BlockProblem
from flexmask.base.checks import check_word, plain_number, plain_numbers
from flexmask.base.head_groups import head_groups, map_bytes, tiled_list_bytes
from flexmask.base.inputs import AttentionInputs, HeadGroup
from flexmask.base.option_checks import check_block_size, check_shares, pairs_by_head, shares_by_head
from flexmask.base.selection import Choice
from flexmask.option_fields import PairsByHead
from flexmask.users_mask import check_takes_keywords, users_choice

_Method = TypeVar("_Method", bound="Method")


class UnknownOption(TypeError):
    """A keyword that is no option of a method; `names` are the other keywords that its caller takes."""

    def __init__(self, message: str, option: str = "", names: tuple[str, ...] = ()) -> None:
        super().__init__(f"{message}; other keywords: {', '.join(names)}" if names else message)
        self.message, self.option, self.names = message, option, names

    def with_names(self, *names: str) -> UnknownOption:
        """The error with more keywords that the caller takes."""
        return UnknownOption(self.message, self.option, (*self.names, *names))


_OWN_MASK = (
    " (causality, window= and attention_mask= are applied already. To add a mask_mod, pass method=f: f(query, key, ...) returns "
    "a BlockMask with your mask_mod, whose blocks are all partial, because FlexAttention skips the mask_mod in full ones: "
    "docs/bring-your-own-kernel.md)"
)

METHODS: dict[str, type[Method]] = {}
"""The table of methods by name; importing `flexmask.block_masks` fills it"""


@dataclass(frozen=True, eq=False)
class Method:
    """A method with its options, checked when it is made; `for_inputs` checks that options per head fit a call.

    A subclass is also a dataclass. Its fields are the options, with ranges by `count_option`, `share_option` and `choice_option`.
    The annotation of a field decides how `select` receives it:

    - ``float``: kernels receive a number; plain steps a 0-d tensor in `widest_float`, but 0 and None as they are.
    - ``ByHead``: a (num_heads,) tensor in `widest_float`; kernels receive one number for all heads as a number.
    - ``PairsByHead``: a (num_heads or 1, 2) tensor in `widest_float`. The field's metadata may name, as ``"default_by_heads"``, a
      function of num_heads whose result replaces None.
    - All others: the value as it is, a constant of compiled code.

    `flexmask.mask_function.mask_function` enters the class into `METHODS` and sets what depends on its fields.
    """

    # what a subclass says of itself
    name = ""  # in `METHODS`
    has_kernels: ClassVar[bool] = False  # it has Triton kernels; its options are numbers, strings, ByHead or PairsByHead
    only_launches: ClassVar[bool] = False  # on the device, the steps of its kernels only allocate memory and launch
    heads_decide_together: ClassVar[bool] = False  # all heads of a batch row must come in one group
    needs_whole_blocks: ClassVar[bool] = False  # it takes only whole prompts of whole blocks
    is_user_method: ClassVar[bool] = False  # it is a user's function of query and key
    # what `read_fields` reads from the fields of a subclass
    defaults: ClassVar[Mapping[str, Any]] = {}  # by name of the option
    float_options: ClassVar[tuple[str, ...]] = ()  # names
    per_head_options: ClassVar[tuple[str, ...]] = ()  # names of ByHead
    pair_options: ClassVar[Mapping[str, Callable[[int], PairsByHead] | None]] = {}  # PairsByHead, and what replaces None
    option_checks: ClassVar[Mapping[str, Callable[[str, Any], None]]] = {}  # by name of the option

    block_size: int = field(default=128, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("block_size", *self.defaults):
            plain = plain_numbers if name in self.per_head_options or name in self.pair_options else plain_number
            object.__setattr__(self, name, plain(getattr(self, name)))
        check_block_size(self.block_size)
        for name in self.per_head_options:
            check_shares(name, getattr(self, name))
        for name, check in self.option_checks.items():
            check(name, getattr(self, name))
        self.check()

    def select(self, problem: BlockProblem) -> Choice | Tensor | None:
        """Choose the blocks: a `Choice`, or a bool map (batch or 1, num_heads or 1, num_q_blocks, num_kv_blocks); None: all."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise for options that do not fit each other or the block."""

    def check_call(self, inputs: AttentionInputs) -> None:
        """Raise for calls that the method does not support."""

    def keeps_every_block(self) -> bool:
        """True if a head keeps all its blocks; options per head hold that head's number."""
        return False

    def last_rows_are_dense(self) -> bool:
        """True if every query block with one of the last `block_size` rows keeps all that it sees, in all heads."""
        return False

    def selection_bytes(self, inputs: AttentionInputs, by_kernels: bool) -> int:
        """Bytes of one head's mask while it is made."""
        return map_bytes(inputs, self.block_size) + 4 * self.block_size * self.floats_per_row(inputs.key.shape[2])

    def floats_per_row(self, kv_len: int) -> int:
        """Number of float32 values that `select` materializes per query row and head.

        If it is not 0, `select` runs on slices of rows: a query block's choice may depend only on its own rows and on the keys.
        """
        return 0

    @classmethod
    def checked(cls: type[_Method], block_size: int, options: Mapping[str, Any]) -> _Method:
        """The method with these options; raises for wrong ones."""
        unknown = [name for name in options if name not in cls.defaults]
        if unknown:
            names = f"the options {', '.join(cls.defaults)}" if cls.defaults else "no options of its own"
            others = ", ".join(name for name, other in METHODS.items() if unknown[0] in other.defaults)
            but_of = f", an option of {others}" if others else ""
            hint = _OWN_MASK if unknown[0] in ("attn_mask", "block_mask", "mask_mod", "score_mod") else ""
            raise UnknownOption(f"method {cls.name!r} takes {names}; got {unknown[0]!r}{but_of}{hint}", unknown[0])
        return cls(block_size=block_size, **options)

    @classmethod
    def unchecked(cls: type[_Method], **values: Any) -> _Method:
        """The method with all its fields as they are given."""
        method = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(method, name, value)
        return method

    def with_options(self: _Method, **options: Any) -> _Method:
        """The method with other values in some options, which are not checked."""
        return self.unchecked(block_size=self.block_size, **{**self.options, **options})

    @property
    def options(self) -> dict[str, Any]:
        """The options by name; an option per head is a number, a tuple or a tensor."""
        return {name: getattr(self, name) for name in self.defaults}

    @property
    def num_heads(self) -> int | None:
        """Number of heads for which an option has a number each; None if the options hold for any number."""
        shares, pairs = ([getattr(self, name) for name in names] for names in (self.per_head_options, self.pair_options))
        per_head = [x for x in shares if isinstance(x, (tuple, Tensor))]
        per_head += [x for x in pairs if isinstance(x, tuple) and isinstance(x[0], tuple) and len(x) > 1]
        return len(per_head[0]) if per_head else None

    def slice_heads(self: _Method, heads: slice) -> _Method:
        """The method with the numbers of some heads, from options that fit all heads."""
        per_head = {name: getattr(self, name) for name in (*self.per_head_options, *self.pair_options)}
        return self.with_options(
            **{name: x[heads] for name, x in per_head.items() if isinstance(x, (tuple, Tensor)) and len(x) > 1}
        )

    def with_options_by_head(self: _Method, query: Tensor) -> _Method:
        """The method with its options per head checked against the heads of `query`, whose values are not read."""
        num_heads = query.shape[1]
        fitted = {name: shares_by_head(name, getattr(self, name), query) for name in self.per_head_options}
        for name, default in self.pair_options.items():
            pairs = getattr(self, name)
            fitted[name] = pairs_by_head(name, default(num_heads) if default is not None and pairs is None else pairs, num_heads)
        return self.with_options(**fitted)

    def for_inputs(self, inputs: AttentionInputs) -> FittedMethod:
        """The method for these inputs; raises if its options per head do not fit, or it does not support them."""
        fitted = self.with_options_by_head(inputs.query)
        fitted.check_call(inputs)
        q_len, kv_len = inputs.query.shape[2], inputs.key.shape[2]
        if self.needs_whole_blocks and (q_len != kv_len or q_len % self.block_size != 0):
            raise ValueError(
                f"method {self.name!r} needs a whole prompt of a multiple of block_size ({self.block_size}) tokens; got q_len "
                f"{q_len} and kv_len {kv_len}"
            )
        return cast("FittedMethod", fitted)

    def keeps_every_block_by_head(self, num_heads: int) -> list[bool]:
        """True for query heads that keep all their blocks. Reads no tensor."""
        per_head = {name: x for name in self.per_head_options if isinstance(x := getattr(self, name), (tuple, Tensor))}
        if any(isinstance(x, Tensor) for x in per_head.values()):
            return [False] * num_heads
        if not per_head:
            return [self.keeps_every_block()] * num_heads
        head_options = ({name: x[head] for name, x in per_head.items()} for head in range(num_heads))
        return [self.with_options(**options).keeps_every_block() for options in head_options]

    def groups(self, inputs: AttentionInputs, max_mask_bytes: int) -> list[HeadGroup]:
        """The heads of the call in groups whose masks fit into so many bytes; a group has at least one head."""
        return head_groups(
            inputs.query, inputs.key, max_mask_bytes // self.peak_bytes_per_head(inputs), self.heads_decide_together
        )

    def peak_bytes_per_head(self, inputs: AttentionInputs) -> int:
        """Bytes of one head's mask in one batch row while it is made, or listed for FLASH."""
        needed = self.selection_bytes(inputs, self.runs_kernels(inputs.query))
        return max(needed, tiled_list_bytes(inputs, self.block_size))

    def runs_kernels(self, query: Tensor) -> bool:
        """True if the method runs as Triton kernels."""
        return HAS_TRITON and query.is_cuda and self.has_kernels and has_real_storage(query)

    @property
    def title(self) -> str:
        """The name with the options, for pictures; only the name in a surrounding compilation, where floats may be symbolic."""
        if is_traced():
            return self.name
        shown = {name: "by head" if isinstance(x, (Tensor, tuple)) else x for name, x in self.options.items()}
        return f"{self.name}({', '.join(f'{name}={x}' for name, x in {'block_size': self.block_size, **shown}.items())})"


FittedMethod = NewType("FittedMethod", Method)
"""A method from `for_inputs`: its options per head fit the heads of a call."""


@dataclass(frozen=True, eq=False)
class UsersMethod(Method):
    """A user's function of query and key, with the options that it is called with."""

    is_user_method = True

    function: Callable[..., Any]
    keywords: Mapping[str, Any]
    name: str = ""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.keywords)

    def with_options(self, **options: Any) -> UsersMethod:
        return self

    def groups(self, inputs: AttentionInputs, max_mask_bytes: int) -> list[HeadGroup]:
        # in a group the function's mask_mod would count prompts and heads from the group's first
        return head_groups(inputs.query, inputs.key, None)

    def select(self, problem: BlockProblem) -> Choice:
        return users_choice(problem, self.function, self.name, self.keywords)


def method_of(method: str | Callable[..., Any], block_size: int, options: Mapping[str, Any]) -> Method:
    """A method with its options, from its name, its mask function (or a partial of it), or a user's function."""
    if not callable(method):
        check_word("method", method, tuple(METHODS))
        return METHODS[method].checked(block_size, options)
    inner: Any = method
    while isinstance(inner, functools.partial) and not inner.args:
        inner, options = inner.func, {**inner.keywords, **options}
    cls = getattr(inner, "method", None)
    if isinstance(cls, type) and issubclass(cls, Method):
        return cls.checked(block_size, options)
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = str(getattr(inner, "__name__", type(inner).__name__))
    users_method = UsersMethod(method, dict(options), name, block_size=block_size)
    if not is_traced():
        check_takes_keywords(method, name, options)
    return users_method
