"""What transformers hands from its mask functions to attention during a prefill: who sees whom, without a map of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from flexmask.integrations.versions import rows_of_queries, window_of

_REFUSAL = "a mask beyond causality, padding and a sliding window (packed sequences, chunked attention, a bidirectional part)"


class PrefillMask(BlockMask):
    """The visibility of one prefill call; a BlockMask only in name, as which transformers passes it on untouched.

    Attributes
    ----------
    shape
        (batch, 1, q_len, kv_len).
    offset
        Position of the first query row among the keys, an int or a 0-d integer tensor.
    attention_mask
        (batch, kv_len) bool, True = token, or None where all are.
    window
        Tokens that a row sees, its own counted, or None.
    refusal
        Why attention cannot serve it, or None.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        offset: int | Tensor,
        attention_mask: Tensor | None = None,
        window: int | None = None,
        refusal: str | None = None,
    ) -> None:
        # not BlockMask's own: it has no lists
        self._shape = shape
        self.offset, self.attention_mask, self.window, self.refusal = offset, attention_mask, window, refusal

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, 1, q_len, kv_len)."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Four, as of a mask that is a tensor."""
        return 4

    def __repr__(self) -> str:
        return f"PrefillMask(shape={self._shape}, window={self.window}, padded={self.attention_mask is not None})"

    __str__ = __repr__

    def contiguous(self) -> PrefillMask:
        """Itself: generate() asks this of every mask that it makes ahead."""
        return self

    def to(self, device: torch.device | str, *args: Any, **kwargs: Any) -> PrefillMask:
        """On another device, where a model spread over several has its next layer."""
        offset = self.offset.to(device) if isinstance(self.offset, Tensor) else self.offset
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        return PrefillMask(self._shape, offset, mask, self.window, self.refusal)


class HookedMask(PrefillMask):
    """The mask of a hooked model: Hugging Face's BlockMask, as that made it, with the visibility beside it."""

    def __init__(self, own: PrefillMask, stock: BlockMask) -> None:
        self.__dict__.update(vars(stock))
        super().__init__(own.shape, own.offset, own.attention_mask, own.window, own.refusal)

    __repr__ = BlockMask.__repr__
    __str__ = BlockMask.__str__


def prefill_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **arguments: Any,
) -> PrefillMask | Tensor | None:
    """The mask function of transformers for a prefill: what it was called for, as attention needs it.

    For a single row, a decoding step, the mask of SDPA: a row of keys, or None where the row sees them all.

    Raises
    ------
    ValueError
        For an `attention_mask` that ends before the last query row; SDPA's mask hides all that it does not reach.
    """
    q_len, first = rows_of_queries(arguments)
    if q_len == 1:
        return AttentionMaskInterface()["sdpa"](
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            **arguments,
        )
    if attention_mask is not None and not torch.compiler.is_compiling() and attention_mask.shape[1] < first + q_len:
        expected = (batch_size, int(first) + q_len)
        raise ValueError(f"attention_mask must be (batch, all tokens so far) = {expected}; got {tuple(attention_mask.shape)}")
    shape = (batch_size, 1, q_len, kv_length)
    # as many rows as keys: the first row stands at the first key, whatever else is said
    offset = 0 if q_len == kv_length else first - kv_offset
    known, window = window_of(mask_function, local_size)
    if not known:
        return PrefillMask(shape, offset, refusal=_REFUSAL)
    return PrefillMask(shape, offset, _of_keys(attention_mask, kv_length, kv_offset), window)


def _of_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int | Tensor) -> Tensor | None:
    """The padding mask of the keys that attention gets, a part of the prompt or more than it; None without padding."""
    if attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all())):
        return None
    position = torch.arange(kv_length, device=attention_mask.device) + kv_offset
    known = position < attention_mask.shape[1]
    return (attention_mask[:, position.clamp(max=attention_mask.shape[1] - 1)] != 0) & known
