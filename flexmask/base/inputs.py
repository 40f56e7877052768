"""One attention call: its tensors and its geometry, checked once at the public boundary."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, NewType, TypeVar, cast

import torch
from torch import Tensor

from flexmask.base.checks import DTYPES, check_inputs, plain_number
from flexmask.base.visibility import TokenValidity, num_blocks, token_validity

# found at import, as dynamo cannot trace the question
_DEVICES = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia") if torch.amp.is_autocast_available(kind)
)

_Inputs = TypeVar("_Inputs", bound="AttentionInputs")


class HeadGroup(NamedTuple):
    """Heads whose masks exist at one time."""

    batch_rows: slice
    query_heads: slice
    kv_heads: slice


class AttentionInputs(NamedTuple):
    """The tensors and numbers of one causal attention call, from `attention_inputs`.

    Query row t has position ``offset + t``. It sees key k iff both are tokens, ``0 <= position - k`` and, with a window,
    ``position - k < window``. Dense attention takes these inputs; masks and sparse attention take `PositionedInputs`.
    """

    query: Tensor  # (batch, num_heads, q_len, head_dim)
    key: Tensor  # (batch, num_kv_heads, kv_len, head_dim)
    value: Tensor | None  # (batch, num_kv_heads, kv_len, v_head_dim); None for a mask only
    scale: float
    softcap: float | None = None
    window: int | None = None  # tokens, the row's own counted
    attention_mask: Tensor | None = None  # (batch, kv_len) bool, True = token
    offset: Tensor | None = None  # (batch,) int32, clamped; None: the last row is at the last key
    sinks: Tensor | None = None  # (num_heads,) floating
    needs_grad: bool = False
    prompt_len: int | None = None  # tokens of the whole prompt, if more than the call's
    out: Tensor | None = None  # (batch, num_heads, q_len, v_head_dim), for a kernel that can write its output into it

    @property
    def distance_limit(self) -> int:
        """Exclusive upper bound of position - k in visible pairs: the window, at most kv_len."""
        kv_len = self.key.shape[2]
        return kv_len if self.window is None else min(self.window, kv_len)

    @property
    def end(self) -> Tensor | int:
        """Position after the last row: kv_len, or (batch,) with an offset."""
        return self.key.shape[2] if self.offset is None else self.offset + self.query.shape[2]

    def num_block_pairs(self, block_size: int) -> int:
        """Number of pairs of a query block and a key block."""
        return num_blocks(self.query.shape[2], block_size) * num_blocks(self.key.shape[2], block_size)

    def tokens(self, call_end: Tensor | None = None) -> TokenValidity:
        """Positions of the rows, and valid rows and keys; `call_end` as in `token_validity`."""
        return token_validity(self.query.shape[2], self.key.shape[2], self.offset, self.attention_mask, self.key, call_end)

    def slice_heads(self: _Inputs, group: HeadGroup) -> _Inputs:
        """The inputs of a group of heads, as views; `self` for a group of all heads."""
        sizes = (group.batch_rows.stop - group.batch_rows.start, group.query_heads.stop - group.query_heads.start)
        if sizes == (self.query.shape[0], self.query.shape[1]):
            return self
        batch, query, key = group
        sliced: dict[str, Tensor | None] = {"query": self.query[batch, query], "key": self.key[batch, key]}
        of_batch = {"attention_mask": batch, "offset": batch}
        for name, index in {"value": (batch, key), "sinks": query, "out": (batch, query), **of_batch}.items():
            tensor = getattr(self, name)
            sliced[name] = None if tensor is None else tensor[index]
        return self.with_fields(**sliced)

    def absent_keys(self) -> Tensor | None:
        """Keys that are not tokens, (batch, 1, kv_len, 1) bool; None: all are tokens."""
        absent = None if self.attention_mask is None else ~self.attention_mask
        if self.offset is not None:
            end = cast(Tensor, self.end).unsqueeze(-1)
            after = torch.arange(self.key.shape[2], device=self.key.device) >= end
            absent = after if absent is None else absent | after
        return None if absent is None else absent[:, None, :, None]

    def for_attention(self) -> PositionedInputs:
        """The inputs of attention, detached unless gradients are needed.

        Values of absent keys are set to zero, because 0 * NaN is NaN; if gradients are needed, so are those keys and padded rows.
        """
        return self.for_attention_with(self.with_offset().offset, self.absent_keys())

    def for_attention_with(self, offset: Tensor | None, absent: Tensor | None) -> PositionedInputs:
        """As `for_attention`, with the results of `with_offset` and `absent_keys` that a plan keeps."""
        query, key, value, sinks = self.query, self.key, self.value, self.sinks
        if not self.needs_grad:
            # FlexAttention's CPU kernel refuses leaves that require gradients even where gradients are off
            query, key = query.detach(), key.detach()
            value = None if value is None else value.detach()
            sinks = None if sinks is None else sinks.detach()
        if absent is not None:
            # not masked_fill, which copies first
            key = torch.where(absent, 0.0, key) if self.needs_grad else key
            value = None if value is None else torch.where(absent, 0.0, value)
        if self.needs_grad and self.attention_mask is not None:
            query = torch.where(self.tokens().row_valid[:, None, :, None], query, 0.0)
        return cast("PositionedInputs", self.with_fields(query=query, key=key, value=value, sinks=sinks, offset=offset))

    def with_offset(self) -> PositionedInputs:
        """Fill in the offset, (batch,) int32, if q_len < kv_len."""
        batch, q_len, kv_len = self.query.shape[0], self.query.shape[2], self.key.shape[2]
        if self.offset is not None or q_len == kv_len:
            return cast("PositionedInputs", self)
        offset = torch.full((batch,), kv_len - q_len, dtype=torch.int32, device=self.query.device)
        return cast("PositionedInputs", self.with_fields(offset=offset))

    def with_fields(self: _Inputs, **fields: Any) -> _Inputs:
        """The inputs with other values in some fields; torch 2.5 cannot trace `_replace`."""
        values = {name: fields[name] if name in fields else getattr(self, name) for name in _FIELDS}
        return cast("_Inputs", AttentionInputs(**values))


_FIELDS = AttentionInputs._fields
PositionedInputs = NewType("PositionedInputs", AttentionInputs)
"""Inputs from `for_attention` or `with_offset`: `offset` is a tensor, or None where row 0 is at position 0."""


def attention_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    sinks: Tensor | None = None,
    prompt_len: int | None = None,
) -> AttentionInputs:
    """Check the arguments of a public function and fill in their defaults; query, key and value follow autocast."""
    query, key, value = map(in_autocast_dtype, (query, key, value))
    scale, softcap, window, q_offset, prompt_len = map(plain_number, (scale, softcap, window, q_offset, prompt_len))
    check_inputs(query, key, value, {"scale": scale, "softcap": softcap}, window, attention_mask, q_offset, sinks, prompt_len)
    batch, max_offset, offset = query.shape[0], key.shape[2] - query.shape[2], None
    # int32 as the indices of a mask_mod: the FLASH backend refuses a mixture
    if isinstance(q_offset, Tensor):
        # `max_offset` may not fit into its dtype; a plain clone would keep a stride of 0, which Inductor's C++ kernel cannot read
        offset = q_offset.to(torch.int64).clamp(0, max_offset).to(torch.int32).expand(batch)
        offset = offset.clone(memory_format=torch.contiguous_format)
    elif q_offset is not None:
        offset = torch.full((batch,), q_offset, dtype=torch.int32, device=query.device)
    return AttentionInputs(
        query,
        key,
        value,
        query.shape[3] ** -0.5 if scale is None else float(scale),
        None if softcap is None else float(softcap),
        window,
        # a copy: the mask outlives the call, and kernels read it row after row
        None if attention_mask is None else (attention_mask != 0).contiguous(),
        offset,
        sinks,
        needs_grad=value is not None and needs_gradients(query, key, value, sinks),
        prompt_len=prompt_len,
    )


def needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Switch autocast off on `device`."""
    if device.type in _DEVICES and torch.is_autocast_enabled(device.type):
        # as text: 2.5.1 cannot trace the generic alias
        return cast("contextlib.AbstractContextManager[None]", torch.autocast(device.type, enabled=False))
    return contextlib.nullcontext()


def in_autocast_dtype(tensor: Any) -> Any:
    """`tensor` in the dtype of autocast, if that is on; what a call would refuse comes back as it is."""
    if isinstance(tensor, Tensor) and tensor.dtype in DTYPES:
        device = tensor.device.type
        if device in _DEVICES and torch.is_autocast_enabled(device):
            return tensor.to(torch.get_autocast_dtype(device))
    return tensor
