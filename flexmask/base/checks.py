"""Checks of single arguments: the message names the argument, what it must be and what was given."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from flexmask._torch import is_under_vmap

_LARGEST = sys.float_info.max  # read here: torch 2.5.1 cannot trace it


def check_int(name: str, value: object) -> None:
    """Raise TypeError unless `value` is an int (bool is not)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")


def check_real(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless `value` is a finite int or float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")
    # by comparisons, which torch.compile can trace where the number is symbolic
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be finite; got {value}")
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{name} must be a number that a float can hold; got one of {len(str(abs(value)))} digits")


def check_int64(name: str, value: int, unit: str) -> None:
    """Raise ValueError if `value` is past the largest int64, which tensors cannot be compared with."""
    if value >= 2**63:
        raise ValueError(f"{name} must be < 2**63 {unit}; got {value}")


def check_word(name: str, value: object, words: tuple[str | None, ...]) -> None:
    """Raise ValueError unless `value` is one of `words`."""
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}; got {value!r}")


def check_shape(name: str, tensor: Tensor, layout: str) -> None:
    """Raise unless `tensor` is a tensor of four dimensions, none of them empty; `layout` names them."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor {layout}; got {type(tensor).__name__}")
    if tensor.dim() != 4:
        raise ValueError(f"{name} must be {layout}; got shape {tuple(tensor.shape)}")
    if 0 in tensor.shape:
        raise ValueError(f"{name} must not be empty; got shape {tuple(tensor.shape)}")


def check_plain(name: str, tensor: Tensor) -> None:
    """Raise unless `tensor` holds values of its own, all of them, on this device."""
    if torch.compiler.is_compiling():
        return
    if type(tensor).__name__ == "DTensor":
        raise TypeError(
            f"{name} must be a plain tensor; got a DTensor: give each device its own heads, as to_local() returns them"
        )
    if is_under_vmap(tensor):
        raise TypeError(f"{name} must be a plain tensor; got one inside torch.vmap: give the batch as the first dimension")
    if tensor.device.type == "meta":
        raise ValueError(f"{name} must hold values; got a tensor on the meta device")


def check_like_query(name: str, tensor: Tensor, query: Tensor) -> None:
    """Raise unless `tensor` has query's dtype and device."""
    if tensor.dtype != query.dtype:
        raise TypeError(f"{name} must have query's dtype {query.dtype}; got {tensor.dtype}")
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on query's device {query.device}; got {tensor.device}")
