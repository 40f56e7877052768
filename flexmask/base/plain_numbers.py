"""NumPy's numbers and arrays as Python's: int, float and tuples of them."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

# torch.compile traces no abstract class; NumPy's float64 is a float
_PLAIN = (int, float, bool, str, bytes, type(None))


def plain_number(value: Any) -> Any:
    """An integer as an int, another real number as a float; anything else, bool too, comes back as it is."""
    if type(value) in _PLAIN or isinstance(value, (bool, Tensor)):
        return value
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    return float(value) if isinstance(value, numbers.Real) else value


def plain_numbers(value: Any) -> Any:
    """As `plain_number`, also inside sequences and arrays, which come back as tuples; tensors stay tensors."""
    if type(value) in _PLAIN or isinstance(value, (str, bytes, Tensor)):
        return value
    if hasattr(value, "__array__") and hasattr(value, "tolist") and not isinstance(value, numbers.Number):
        value = value.tolist()
    return tuple(plain_numbers(each) for each in value) if isinstance(value, Sequence) else plain_number(value)
