"""Small constant tensors: on CUDA those of earlier calls, which saves their launches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from flexmask._torch import in_dispatch_mode, in_transform, is_traced, stream_of

_Made = TypeVar("_Made")
_is_capturing = torch.cuda.is_current_stream_capturing


def made_once(make: Callable[..., _Made], device: torch.device, *values: Hashable) -> _Made:
    """``make(device, *values)``, tensors that nobody writes to; on CUDA what an earlier call with values equal in type made."""
    # a mode's or transform's tensors must not outlive it, nor a captured graph's memory the graph
    if device.type != "cuda" or is_traced() or in_dispatch_mode() or in_transform() or _is_capturing():
        return make(device, *values)
    # per stream, so none reads it before it is written; inference mode is guarded by compiled code
    made: _Made = _kept(make, device, stream_of(device), torch.is_inference_mode_enabled(), *values)
    return made


# typed: a named tuple equals a plain one
@functools.lru_cache(maxsize=512, typed=True)
def _kept(make: Callable[..., _Made], device: torch.device, stream: int, inference: bool, *values: Hashable) -> _Made:
    return make(device, *values)
