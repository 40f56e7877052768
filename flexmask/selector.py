"""A method chooses blocks; a selector is a method with its options, checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import Tensor

from flexmask._torch import HAS_TRITON, is_in_memory, is_traced
from flexmask.base.checks import (
    check_block_size,
    check_count,
    check_share,
    check_shares,
    check_word,
    pairs_by_head,
    plain_number,
    plain_numbers,
    shares_by_head,
)
from flexmask.base.inputs import AttentionInputs, HeadGroup, head_groups, map_bytes, tiled_list_bytes
from flexmask.base.selection import Choice
from flexmask.users_mask import check_takes_keywords, users_choice

# types of options in methods' signatures, by which `flexmask.method` finds them
ByHead = Annotated[float | Sequence[float] | Tensor, "by head"]
PairsByHead = Annotated[Sequence[float] | Sequence[Sequence[float]], "pairs by head"]


class UnknownOption(TypeError):
    """A keyword that is no option of a method; `names` are those of others that its caller takes."""

    def __init__(self, message: str, option: str = "", names: tuple[str, ...] = ()) -> None:
        super().__init__(f"{message}; other keywords: {', '.join(names)}" if names else message)
        self.message, self.option, self.names = message, option, names

    def with_names(self, *names: str) -> UnknownOption:
        """The same, with more keywords that the caller takes."""
        return UnknownOption(self.message, self.option, (*self.names, *names))


_OWN_MASK = (
    " (causality, window= and attention_mask= are known; for a mask_mod of yours pass as method a function that returns a "
    "BlockMask, which takes and_masks(mask.mask_mod, yours): docs/bring-your-own-kernel.md)"
)

METHODS: dict[str, Method] = {}
"""The table of methods by name; importing `flexmask.block_masks` fills it"""


@dataclass(frozen=True)
class Method:
    """A method: the function that chooses blocks, and how to call it."""

    choose: Callable[..., Tensor | Choice | None]  # from a `BlockProblem` and the options; in steps to a `Choice`
    defaults: dict[str, Any]  # its options by name
    name: str  # in the table
    # options that are floats, shares by head, and pairs by head with the function of num_heads that replaces None
    floats: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    pairs: Mapping[str, Callable[[int], PairsByHead] | None] = field(default_factory=dict)
    counts: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # {"sink_blocks": (0, "blocks")}: least value, unit
    ranges: Mapping[str, str] = field(default_factory=dict)  # {"tau": "[0, 1]"}: interval of a share that is no share by head
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # {"lines": ("pooled", "covering")}
    check: Callable[..., None] | None = None  # of block_size and options; raises for those that it does not serve
    check_call: Callable[..., None] | None = None  # of inputs too
    keeps_all: Callable[..., bool] | None = None  # of one head's options: it keeps all its blocks; None: never
    has_kernels: bool = False  # kernels serve it on CUDA
    # bytes of one head's mask while it is made, of inputs, block_size, whether kernels serve it, and options
    head_bytes: Callable[..., int] | None = None
    # float32 numbers that it writes out per query row and head, of kv_len, block_size and options. It then runs on slices of
    # rows: a query block's choice must depend only on its own rows and the keys
    row_numbers: Callable[..., int] | None = None
    shared: bool = False  # the heads decide together
    whole_blocks: bool = False  # whole prompts of whole blocks only
    is_users: bool = False  # a user's function of query and key

    def checked(self, block_size: int, options: Mapping[str, Any]) -> Selector:
        """The method with these options; raises for wrong ones. Numbers by head are not yet compared with any heads."""
        block_size = plain_number(block_size)
        check_block_size(block_size)
        unknown = [name for name in options if name not in self.defaults]
        if unknown:
            names = ", ".join(self.defaults) or "of every mask only"
            others = ", ".join(name for name, other in METHODS.items() if unknown[0] in other.defaults)
            but_of = f", an option of {others}" if others else ""
            hint = _OWN_MASK if unknown[0] in ("attn_mask", "block_mask", "mask_mod", "score_mod") else ""
            raise UnknownOption(f"method {self.name!r} takes the options {names}; got {unknown[0]!r}{but_of}{hint}", unknown[0])
        by_head = (*self.shares, *self.pairs)
        filled = {n: (plain_numbers if n in by_head else plain_number)(x) for n, x in {**self.defaults, **options}.items()}
        for name in self.shares:
            check_shares(name, filled[name])
        for name, (least, unit) in self.counts.items():
            check_count(name, filled[name], least, unit)
        for name, interval in self.ranges.items():
            if filled[name] is not None or self.defaults[name] is not None:
                check_share(name, filled[name], interval)
        for name, words in self.words.items():
            check_word(name, filled[name], words)
        if self.check is not None:
            self.check(block_size=block_size, **filled)
        return Selector(self, block_size, filled)


@dataclass(frozen=True, eq=False)
class Selector:
    """A method with its options, checked."""

    method: Method
    block_size: int
    options: dict[str, Any]  # defaults filled in; by head a number, a tuple or a tensor

    @property
    def num_heads(self) -> int | None:
        """Number of heads that an option has a number for; None if the options hold for any."""
        shares, pairs = ([self.options[name] for name in names] for names in (self.method.shares, self.method.pairs))
        by_head = [x for x in shares if isinstance(x, (tuple, Tensor))]
        by_head += [x for x in pairs if isinstance(x, tuple) and isinstance(x[0], tuple) and len(x) > 1]
        return len(by_head[0]) if by_head else None

    def of_heads(self, heads: slice) -> Selector:
        """The same for some heads, of options that `options_of_heads` compared with all."""
        return Selector(self.method, self.block_size, self._cut_options(heads))

    def _cut_options(self, heads: slice) -> dict[str, Any]:
        cut = dict(self.options)
        for name in (*self.method.shares, *self.method.pairs):
            if isinstance(cut[name], (tuple, Tensor)) and len(cut[name]) > 1:
                cut[name] = cut[name][heads]
        return cut

    def options_of_heads(self, query: Tensor) -> dict[str, Any]:
        """Its options, those by head compared with the heads of `query`, of which no value is read."""
        filled, num_heads = dict(self.options), query.shape[1]
        for name in self.method.shares:
            filled[name] = shares_by_head(name, filled[name], query)
        for name, make in self.method.pairs.items():
            pairs = make(num_heads) if make is not None and filled[name] is None else filled[name]
            filled[name] = pairs_by_head(name, pairs, num_heads)
        return filled

    def for_inputs(self, inputs: AttentionInputs) -> CallSelector:
        """The same for these inputs; raises if numbers by head do not fit, or the method does not serve them."""
        method, filled, num_heads = self.method, self.options_of_heads(inputs.query), inputs.query.shape[1]
        if method.check_call is not None:
            method.check_call(inputs, block_size=self.block_size, **filled)
        q_len, kv_len = inputs.query.shape[2], inputs.key.shape[2]
        if method.whole_blocks and (q_len != kv_len or q_len % self.block_size != 0):
            raise ValueError(
                f"method {method.name!r} needs a whole prompt of a multiple of block_size ({self.block_size}) tokens; got q_len "
                f"{q_len} and kv_len {kv_len}"
            )
        row_numbers = 0
        if method.row_numbers is not None:
            row_numbers = max(1, method.row_numbers(kv_len, self.block_size, **filled))
        return CallSelector(method, self.block_size, filled, _keeps_all(method, filled, num_heads), row_numbers)

    def runs_kernels(self, query: Tensor) -> bool:
        """True if the Triton kernels serve it."""
        return HAS_TRITON and query.is_cuda and self.method.has_kernels and is_in_memory(query)

    @property
    def title(self) -> str:
        """Its name with its options, for pictures; in a surrounding compilation, where floats may be symbolic, only the name."""
        if is_traced():
            return self.method.name
        shown = {name: "by head" if isinstance(x, (Tensor, tuple)) else x for name, x in self.options.items()}
        return f"{self.method.name}({', '.join(f'{name}={x}' for name, x in {'block_size': self.block_size, **shown}.items())})"


@dataclass(frozen=True, eq=False)
class CallSelector(Selector):
    """A selector for one call: its options by head fit the heads."""

    keeps_all: list[bool]  # by query head
    row_numbers: int  # `Method.row_numbers`, at least 1 of a method that has it, else 0

    def of_heads(self, heads: slice) -> CallSelector:
        options, keeps_all = self._cut_options(heads), self.keeps_all[heads]
        return CallSelector(self.method, self.block_size, options, keeps_all, self.row_numbers)

    def groups(self, inputs: AttentionInputs, max_mask_bytes: int) -> list[HeadGroup]:
        """The heads of the call in groups whose masks fit into so many bytes, a head at least."""
        return head_groups(inputs.query, inputs.key, max_mask_bytes // self.head_bytes(inputs), self.method.shared)

    def head_bytes(self, inputs: AttentionInputs) -> int:
        """Bytes of one head's mask in one batch row while it is made, or listed for FLASH."""
        if self.method.head_bytes is None:
            needed = map_bytes(inputs, self.block_size) + 4 * self.block_size * self.row_numbers
        else:
            needed = self.method.head_bytes(inputs, self.block_size, self.runs_kernels(inputs.query), **self.options)
        return max(needed, tiled_list_bytes(inputs, self.block_size))


def _keeps_all(method: Method, options: dict[str, Any], num_heads: int) -> list[bool]:
    """For each query head: it keeps all its blocks. Reads no tensor."""
    keeps_all, by_head = method.keeps_all, [name for name in method.shares if isinstance(options[name], (tuple, Tensor))]
    if keeps_all is None or any(isinstance(options[name], Tensor) for name in by_head):
        return [False] * num_heads
    if not by_head:
        return [keeps_all(**options)] * num_heads
    return [keeps_all(**{**options, **{name: options[name][head] for name in by_head}}) for head in range(num_heads)]


def selector_of(named: str | Callable[..., Any], block_size: int, options: Mapping[str, Any]) -> Selector:
    """A checked method with its options, from its name, its mask function (or a partial of it), or a user's function."""
    if not callable(named):
        check_word("method", named, tuple(METHODS))
        return METHODS[named].checked(block_size, options)
    inner: Any = named
    while isinstance(inner, functools.partial) and not inner.args:
        inner, options = inner.func, {**inner.keywords, **options}
    method = getattr(inner, "method", None)
    if isinstance(method, Method):
        return method.checked(block_size, options)
    while isinstance(inner, functools.partial):
        inner = inner.func
    block_size = plain_number(block_size)
    check_block_size(block_size)
    name = str(getattr(inner, "__name__", type(inner).__name__))
    if not is_traced():
        check_takes_keywords(named, name, options)
    users = Method(users_choice(named, name), dict(options), name, is_users=True)
    return Selector(users, block_size, dict(options))
