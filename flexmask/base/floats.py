"""The widest float of a device, and running sums that stay accurate without float64."""

from __future__ import annotations

import torch
from torch import Tensor

_FRACTION_BITS = 40


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 where `device` lacks it: Apple's GPUs and some of Intel's. For sums and thresholds."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64


def running_sums(values: Tensor, precision: torch.dtype) -> Tensor:
    """Cumulative sums over the last dimension, in `precision`: torch.float64 or torch.float32.

    `values` are float32 >= 0 with sums of at most 2**22; NaN affects only its line. A running float32 sum over a large map never
    reaches 0.99 of its total: without float64 the sums are int64, of values cut to 40 binary places.
    """
    if precision == torch.float64:
        return values.double().cumsum(-1)
    return (values * 2.0**_FRACTION_BITS).to(torch.int64).cumsum(-1).float() * 2.0**-_FRACTION_BITS
