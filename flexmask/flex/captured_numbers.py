"""Python numbers that a user's mask_mod captures, as constants of the compiled kernel, which takes few symbolic ones."""

from __future__ import annotations

import contextlib
import functools
import numbers
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from flexmask._torch import is_traced
from flexmask.base.selection import Selection
from flexmask.flex.block_mask import MaskMod


def with_constant_numbers(selection: Selection, backend: str) -> Selection:
    """`selection` with a user's mask_mod whose numbers are constants; its title, hence the compiled kernel, names them."""
    # a number that changes is symbolic: kernels for CPUs and FLASH take none, Triton's no floats (2.13)
    own = selection.mask_mod
    if own is None or is_traced():
        return selection
    takes_ints = backend == "triton"
    values = [value for value in captured_values(own) if not (takes_ints and type(value) is int)]
    mask_mod = own
    if not takes_ints:
        # torch.compile takes ints that it reaches through a default argument as constants
        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, own: MaskMod = own) -> Tensor:
            return own(b, h, q_idx, kv_idx)

    return selection.with_fields(mask_mod=mask_mod, title=f"{selection.title}{values}" if values else selection.title)


def constant_floats(selection: Selection) -> contextlib.AbstractContextManager[Any]:
    """A context in which torch.compile takes floats as constants, where the mask_mod is a user's; in torch 2.13 by thread."""
    if selection.mask_mod is None or is_traced():
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(specialize_float=True)
    return patched


def captured_values(function: Any) -> Iterator[Hashable]:
    """Numbers and words in a function's closure, defaults and partials, also in containers and attributes; not its globals."""
    waiting: list[Any] = [function]
    seen: set[int] = set()
    names: set[str] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, (numbers.Number, str)):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += reversed(_parts(value, names))


def _parts(value: Any, names: set[str]) -> list[Any]:
    """The parts of `value`; of objects the attributes in `names`, to which a function adds those that it reads."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        names.update(value.__code__.co_names)
        # a cell of a variable that has no value yet equals an empty one
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [*cells, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (type, types.ModuleType, Tensor)) or not hasattr(value, "__dict__"):
        return []
    own = _parts(type(value).__call__, names) if callable(value) else []
    return [*own, *(part for name, part in vars(value).items() if name in names)]
