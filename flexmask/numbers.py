"""Options that are numbers, as tensors on the device: another value is not another compilation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flexmask._torch import is_traced, keep_static
from flexmask.base.floats import widest_float
from flexmask.selector import Selector


def numbers_of(selector: Selector, query: Tensor, heads: slice | None) -> dict[str, Tensor]:
    """The options that are numbers, in `widest_float`: floats except 0 are 0-d, shares (num_heads,), pairs (.., 2).

    Those by head are for `heads` of the call.
    """
    device, method, options = query.device, selector.method, selector.options
    if heads is not None:
        options = {**options, **{name: _of_heads(options[name], heads) for name in (*method.shares, *method.pairs)}}
    tensors = {name: options[name] for name in method.shares if isinstance(options[name], Tensor)}
    values: dict[str, Any] = {name: options[name] for name in method.floats if options[name] is not None and options[name] != 0}
    for name in method.shares:
        if name not in tensors:
            values[name] = options[name]
    values |= {name: options[name] for name in method.pairs}
    heads_here = query.shape[1]
    tensors |= {name: _written(device, value, (heads_here,) if name in method.shares else ()) for name, value in values.items()}
    if not selector.runs_kernels(query):
        _keep_static(device, tensors.values())
    return tensors


def _of_heads(value: Any, heads: slice) -> Any:
    return value[heads] if isinstance(value, (tuple, Tensor)) and len(value) > 1 else value


def _written(device: torch.device, value: Any, shape: tuple[int, ...] = ()) -> Tensor:
    """A number, filled into `shape`, or a tuple of numbers; the host does not wait."""
    dtype = widest_float(device)
    if not isinstance(value, tuple):
        return torch.full(shape, value, dtype=dtype, device=device)
    if device.type == "cuda" and not is_traced() and not torch.cuda.is_current_stream_capturing():
        return torch.tensor(value, dtype=dtype).to(device, non_blocking=True)
    # a captured copy would read the host's memory again
    return torch.stack([_written(device, each) for each in value])


def _keep_static(device: torch.device, tensors: Iterable[Tensor]) -> None:
    if device.type == "cuda" and not is_traced():
        for tensor in tensors:
            keep_static(tensor)
