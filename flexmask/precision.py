"""Arithmetic without autocast and without TF32, whatever the program has set."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, cast

import torch

from flexmask.base.autocast import autocast_is_on


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Switch autocast off on `device`."""
    if autocast_is_on(device):
        # as text: 2.5.1 cannot trace the generic alias
        return cast("contextlib.AbstractContextManager[None]", torch.autocast(device.type, enabled=False))
    return contextlib.nullcontext()


class _Tf32:
    """The number of open `without_tf32` blocks in this process, and the setting that the last of them restores."""

    lock = threading.Lock()
    open_blocks = 0
    restored: Any = None


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 matmuls at full precision on CUDA; the program's setting is put back.

    The setting belongs to the process: of overlapping blocks the first switches TF32 off, the last restores it.
    Other threads run at full precision meanwhile, and may switch TF32 on again.
    """
    matmul = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")
    name, off = ("fp32_precision", "ieee") if newer else ("allow_tf32", False)
    with _Tf32.lock:
        if _Tf32.open_blocks == 0:
            before = getattr(matmul, name)
            # may be inherited
            inherited = newer and getattr(torch.backends, name, None) == before
            _Tf32.restored = None if before not in (True, "tf32") else "none" if inherited else before
        if _Tf32.restored is not None:
            setattr(matmul, name, off)
        _Tf32.open_blocks += 1
    try:
        yield
    finally:
        with _Tf32.lock:
            _Tf32.open_blocks -= 1
            if _Tf32.open_blocks == 0 and _Tf32.restored is not None:
                setattr(matmul, name, _Tf32.restored)
