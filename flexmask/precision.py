"""TF32, a setting of the process that calls share: off while some need full precision."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from flexmask.locking import locked


class _Block:
    """An open `without_tf32`. An interrupt before it closes leaves none."""

    is_open = True


_LOCK = threading.RLock()
_blocks: weakref.WeakSet[_Block] = weakref.WeakSet()  # per process
_restored: tuple[Any] | None = None  # while TF32 is off for them: the program's setting, or None if that was off too


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 matmuls at full precision on CUDA, in the whole process: the first block switches it over, the last back."""
    block = _Block()
    try:
        _settle(block)
        yield
    finally:
        block.is_open = False
        _settle()


@locked(_LOCK)
def _settle(*opened: _Block) -> None:
    """Switch TF32 off while blocks are open, else back; complete what an interrupted call left undone."""
    global _restored
    matmul = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")
    name, off = ("fp32_precision", "ieee") if newer else ("allow_tf32", False)
    _blocks.update(opened)
    if any(block.is_open for block in _blocks):
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
