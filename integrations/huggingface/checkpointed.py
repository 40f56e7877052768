"""The block of a prefill, for checkpointed layers, which a backward runs again."""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, ref

from flexmask._torch import is_in_backward

BLOCK_ENDED = (
    "flexmask's mask of a prefill is used after its sparse_prefill block has ended; call backward inside the block, since it "
    "runs checkpointed layers again, and keep no mask beyond the block"
)


class MaskNotServed(NotImplementedError, AttributeError):
    """A model read more of its mask than `PrefillMask` has. An AttributeError for ``hasattr``."""


class Prefill:
    """One mask-function call, shared by its masks, with the block that serves it."""

    def __init__(self) -> None:
        self._served = False
        # weak: a run keeps its latest prefill, and a block its model
        self._block: ReferenceType[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Prefill, ()

    def block(self, current: Any) -> Any:
        """`current`, the model's open block or None; in a backward that of the forward."""
        if not (self._served and is_in_backward()):
            if not self._served:
                self._served, self._block = True, None if current is None else ref(current)
            return current
        if self._block is None:
            return None
        block = self._block()
        if block is None or not block.is_open:
            raise MaskNotServed(BLOCK_ENDED)
        return block
