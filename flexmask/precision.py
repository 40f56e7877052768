"""Arithmetic without autocast and without TF32, whatever the program has set."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch

from flexmask.base.inputs import autocast_is_on
from flexmask.locked import locked


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Switch autocast off on `device`."""
    if autocast_is_on(device):
        # as text: 2.5.1 cannot trace the generic alias
        return cast("contextlib.AbstractContextManager[None]", torch.autocast(device.type, enabled=False))
    return contextlib.nullcontext()


class _Block:
    """An open `without_tf32`. An interrupt before it closes leaves none."""

    is_open = True


_LOCK = threading.RLock()
_blocks: tuple[weakref.ref[_Block], ...] = ()  # per process
_restored: tuple[Any] | None = None  # while TF32 is off for them: the program's setting, or None if that was off too


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 matmuls at full precision on CUDA; the program's setting is put back.

    The setting belongs to the process: of overlapping blocks the first switches TF32 off, the last restores it.
    Other threads run at full precision meanwhile, and may switch TF32 on again.
    """
    block = _Block()
    try:
        _settle(weakref.ref(block))
        yield
    finally:
        block.is_open = False
        _settle()


@locked(_LOCK)
def _settle(*opened: weakref.ref[_Block]) -> None:
    """Switch TF32 off while blocks are open, else back; complete what an interrupted call left undone."""
    global _blocks, _restored
    matmul = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")
    name, off = ("fp32_precision", "ieee") if newer else ("allow_tf32", False)
    _blocks = tuple(each for each in (*_blocks, *opened) if (block := each()) is not None and block.is_open)
    if _blocks:
        if _restored is None:
            before = getattr(matmul, name)
            # may be inherited
            inherited = newer and getattr(torch.backends, name, None) == before
            # noted before it changes
            _restored = (None if before not in (True, "tf32") else "none" if inherited else before,)
        if _restored[0] is not None:
            setattr(matmul, name, off)
    elif _restored is not None:
        if _restored[0] is not None:
            setattr(matmul, name, _restored[0])
        _restored = None
