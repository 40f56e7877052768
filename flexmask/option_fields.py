"""Options of a method as fields of its class: their types, their checks, and what the class reads from them."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from flexmask.base.checks import check_word
from flexmask.base.option_checks import check_count, check_share

# types of options, which decide how they reach `Method.select`
ByHead = Annotated[float | Sequence[float] | Tensor, "by head"]
PairsByHead = Annotated[Sequence[float] | Sequence[Sequence[float]], "pairs by head"]


def count_option(default: int, minimum: int = 0, unit: str = "blocks") -> Any:
    """An option that is an integer of at least `minimum`."""
    return field(default=default, metadata={"check": lambda name, value: check_count(name, value, minimum, unit)})


def share_option(default: float | None, interval: str = "(0, 1]") -> Any:
    """An option that is a number in an interval, one of `check_share`; also None if that is its default."""

    def check(name: str, value: Any) -> None:
        if value is not None or default is not None:
            check_share(name, value, interval)

    return field(default=default, metadata={"check": check})


def choice_option(*words: str) -> Any:
    """An option that is one of these words, the first by default."""
    return field(default=words[0], metadata={"check": lambda name, value: check_word(name, value, words)})


def read_fields(cls: type[Any]) -> None:
    """Set what depends on the fields of a method's class: its defaults and kinds of options."""
    # Python 3.10 refuses KW_ONLY as a hint
    hints = get_type_hints(cls, localns={"KW_ONLY": Any}, include_extras=True)
    options = [each for each in fields(cls) if each.name != "block_size"]
    kinds = {each.name: _alternatives(hints[each.name]) for each in options}
    passed = (int, float, bool, str, type(None), ByHead, PairsByHead)
    for name, alternatives in kinds.items() if cls.has_kernels else ():
        if any(kind not in passed for kind in alternatives):
            raise TypeError(f"option {name} of a method with kernels must be annotated as a number, word, ByHead or PairsByHead")
    cls.defaults = {each.name: each.default for each in options}
    cls.float_options = tuple(name for name, alternatives in kinds.items() if float in alternatives)
    cls.per_head_options = tuple(name for name, alternatives in kinds.items() if ByHead in alternatives)
    cls.pair_options = {each.name: each.metadata.get("default_by_heads") for each in options if PairsByHead in kinds[each.name]}
    cls.option_checks = {each.name: each.metadata["check"] for each in options if "check" in each.metadata}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The parts of an annotation: those of a union, else itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
