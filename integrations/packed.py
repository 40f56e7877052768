"""Packed prompts: several in one batch row, told apart by position_ids that start again."""

from __future__ import annotations

import torch
from torch import Tensor


class PackedCheck:
    """Detects positions that start again within one prefill, without a wait for the device.

    On CPUs the answer is there at once. On CUDA the first layer begins to copy it to the host, and the layers after it look
    whether it has come: they are launched far more slowly than it takes. One layer alone does not learn it.
    """

    def __init__(self) -> None:
        self._answer: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def is_packed(self, position_ids: Tensor, attention_mask: Tensor | None, offset: int | Tensor) -> bool:
        """True once the positions are known to start again; each layer asks, with the same arguments."""
        if torch.compiler.is_compiling() or (position_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        if self._answer is None:
            answer = starts_again(position_ids, attention_mask, offset)
            if answer.is_cuda:
                self._answer = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(answer, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(answer.device))
            else:
                self._answer = answer if answer.device.type == "cpu" else torch.zeros((), dtype=torch.bool)
        return (self._copied is None or self._copied.query()) and bool(self._answer)


def starts_again(position_ids: Tensor, attention_mask: Tensor | None, offset: int | Tensor) -> Tensor:
    """0-d bool: of two tokens next to each other, the second stands before the first, or both at 0.

    Pairs with padding do not count, since their positions mean nothing. Gaps, and equal positions other than 0, are no restart.

    Parameters
    ----------
    position_ids
        (batch or 1, q_len) integer.
    attention_mask
        (batch, kv_len) bool, True = token, or None.
    offset
        Position of the first row among the keys.
    """
    left, right = position_ids[:, :-1], position_ids[:, 1:]
    again = (right < left) | ((right == 0) & (left == 0))
    if attention_mask is not None:
        row = offset + torch.arange(position_ids.shape[1], device=position_ids.device)
        token = attention_mask.to(position_ids.device)[:, row]
        again = again & token[:, :-1] & token[:, 1:]
    return again.any()
