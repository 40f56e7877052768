"""The widest float of a device."""

from __future__ import annotations

import torch


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 where `device` lacks it: Apple's GPUs and some of Intel's. For sums and thresholds."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64
