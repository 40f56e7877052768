"""Finds packed sequences: by ids, by bounds, or by positions that restart."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from flexmask._torch import is_fake, is_readable
from flexmask.flex.packed import Segment
from flexmask.varlen import segments_of

Segments = tuple[Segment, ...]


def segments_of_ids(ids: Tensor, batch: int) -> Segments | None:
    """The sequences of a concatenated batch by (batch or 1, q_len) integer ids; None if each row is one. Waits for the device."""
    if is_fake(ids):  # shapes do not depend on the sequences
        return None
    length = ids.shape[1]
    changes = (ids[:, 1:] != ids[:, :-1]).cpu().expand(batch, -1).nonzero().tolist()
    if not changes:
        return None
    bounds = sorted({row * length + token + 1 for row, token in changes}.union(range(0, batch * length + 1, length)))
    return tuple(Segment(slice(start, end), slice(start, end)) for start, end in itertools.pairwise(bounds))


class GivenBounds:
    """The sequences of `cu_seq_lens_q` and `cu_seq_lens_k`, read once per forward."""

    def __init__(self) -> None:
        self._latest: tuple[Tensor, Tensor, Segments] | None = None  # the bounds read last, and their sequences

    def segments(self, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, tokens: int) -> Segments:
        """The sequences of a pack of `tokens` tokens. Raises TypeError or ValueError for bounds that do not fit."""
        if self._latest is None or self._latest[0] is not cu_seq_lens_q or self._latest[1] is not cu_seq_lens_k:
            try:
                segments = tuple(segments_of(cu_seq_lens_q, cu_seq_lens_k, tokens, tokens))
            except (TypeError, ValueError) as error:
                # name the arguments as transformers spells them
                raise type(error)(str(error).replace("cu_seqlens_", "cu_seq_lens_")) from None
            self._latest = (cu_seq_lens_q, cu_seq_lens_k, segments)
        return self._latest[2]


class PackedCheck:
    """Detects positions that restart, without waiting: on CUDA the first layer starts a copy, which later layers poll."""

    def __init__(self) -> None:
        self._answer: Tensor | None = None
        self._copy_event: torch.cuda.Event | None = None

    def is_packed(self, position_ids: Tensor, attention_mask: Tensor | None, offset: int | Tensor) -> bool:
        """True once the positions are found to restart."""
        if not is_readable(position_ids) or (position_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        if self._answer is None:
            answer = _restarts(position_ids, attention_mask, offset)
            if answer.is_cuda:
                self._answer = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(answer, non_blocking=True)
                self._copy_event = torch.cuda.Event()
                self._copy_event.record(torch.cuda.current_stream(answer.device))
            else:
                self._answer = answer if answer.device.type == "cpu" else torch.zeros((), dtype=torch.bool)
        return (self._copy_event is None or self._copy_event.query()) and bool(self._answer)


def _restarts(position_ids: Tensor, attention_mask: Tensor | None, offset: int | Tensor) -> Tensor:
    """0-d bool: some position is below its predecessor, or both are 0. Ignores padding, whose positions are arbitrary."""
    left, right = position_ids[:, :-1], position_ids[:, 1:]
    restarts = (right < left) | ((right == 0) & (left == 0))
    if attention_mask is not None:
        row = offset + torch.arange(position_ids.shape[1], device=position_ids.device)
        is_token = attention_mask.to(position_ids.device)[:, row]
        restarts = restarts & is_token[:, :-1] & is_token[:, 1:]
    return restarts.any()
