"""Options that are numbers, as tensors on the device: another value is not another compilation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmask._torch import is_traced, keep_static
from flexmask.base.floats import widest_float
from flexmask.base.kept import made_once
from flexmask.selector import Selector


class Filled(NamedTuple):
    """The same number for every head."""

    number: float
    heads: int


def numbers_of(selector: Selector, query: Tensor, heads: slice | None) -> dict[str, Tensor]:
    """The options that are numbers, in `widest_float`: floats except 0 are 0-d, shares (num_heads,), pairs (.., 2).

    Those by head are for `heads` of the call. On CUDA those of earlier calls are reused.
    """
    device, method, options = query.device, selector.method, selector.options
    if heads is not None:
        options = {**options, **{name: _of_heads(options[name], heads) for name in (*method.shares, *method.pairs)}}
    tensors = {name: options[name] for name in method.shares if isinstance(options[name], Tensor)}
    values: dict[str, Any] = {name: options[name] for name in method.floats if options[name] is not None and options[name] != 0}
    for name in method.shares:
        if name not in tensors:
            values[name] = options[name] if isinstance(options[name], tuple) else Filled(options[name], query.shape[1])
    values |= {name: options[name] for name in method.pairs}
    _keep_static(device, tensors.values())
    return {**dict(zip(values, made_once(_written, device, *values.values()), strict=True)), **tensors}


def _of_heads(value: Any, heads: slice) -> Any:
    return value[heads] if isinstance(value, (tuple, Tensor)) and len(value) > 1 else value


def _written(device: torch.device, *values: Any) -> tuple[Tensor, ...]:
    """The numbers, filled on the device: copying a list from the host would wait."""
    dtype = widest_float(device)

    def written(value: Any) -> Tensor:
        if isinstance(value, Filled):
            return torch.full((value.heads,), value.number, dtype=dtype, device=device)
        if isinstance(value, tuple):
            return torch.stack([written(each) for each in value])
        return torch.full((), value, dtype=dtype, device=device)

    made = tuple(written(value) for value in values)
    _keep_static(device, made)
    return made


def _keep_static(device: torch.device, tensors: Iterable[Tensor]) -> None:
    if device.type == "cuda" and not is_traced():
        for tensor in tensors:
            keep_static(tensor)
