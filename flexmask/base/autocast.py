"""The dtype that autocast gives SDPA's inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmask.base.checks import DTYPES

# at import: dynamo cannot trace it
_DEVICES = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia") if torch.amp.is_autocast_available(kind)
)


def autocast_is_on(device: torch.device) -> bool:
    return device.type in _DEVICES and torch.is_autocast_enabled(device.type)


def in_autocast_dtype(tensor: Any) -> Any:
    """`tensor` in the dtype of autocast if that is on; what no call takes is left for the checks."""
    if isinstance(tensor, Tensor) and tensor.dtype in DTYPES and autocast_is_on(tensor.device):
        return tensor.to(torch.get_autocast_dtype(tensor.device.type))
    return tensor
