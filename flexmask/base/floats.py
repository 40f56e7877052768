"""The widest float of a device, in which sums and thresholds are computed."""

from __future__ import annotations

import torch


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 where `device` has no float64: Apple's GPUs and some of Intel's."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64
