"""One attention call: its tensors and its geometry, checked once at the public boundary."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, NewType, TypeVar, cast

import torch
from torch import Tensor

from flexmask.base.checks import DTYPES, check_inputs, plain_number

# found at import, as dynamo cannot trace the question
_DEVICES = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia") if torch.amp.is_autocast_available(kind)
)


_Inputs = TypeVar("_Inputs", bound="AttentionInputs")


class HeadGroup(NamedTuple):
    """Heads whose masks exist at one time."""

    batch: slice
    query: slice
    key: slice


class AttentionInputs(NamedTuple):
    """The tensors and numbers of one causal attention call, from `attention_inputs`.

    Query row t stands at position ``offset + t``. It sees key k iff both are tokens, ``0 <= position - k`` and, with a window,
    ``position - k < window``. Dense attention takes them as they are, masks and sparse attention `SparseInputs`.
    """

    query: Tensor  # (batch, num_heads, q_len, head_dim)
    key: Tensor  # (batch, num_kv_heads, kv_len, head_dim)
    value: Tensor | None  # (batch, num_kv_heads, kv_len, v_head_dim); None for a mask only
    scale: float
    softcap: float | None = None
    window: int | None = None  # tokens, the row's own counted
    attention_mask: Tensor | None = None  # (batch, kv_len) bool, True = token
    offset: Tensor | None = None  # (batch,) int32, clamped; None: the last row stands at the last key
    sinks: Tensor | None = None  # (num_heads,) floating
    needs_grad: bool = False

    @property
    def max_distance(self) -> int:
        """Tokens between a row and a key that no visible pair reaches: the window, at most kv_len."""
        kv_len = self.key.shape[2]
        return kv_len if self.window is None else min(self.window, kv_len)

    def of_heads(self: _Inputs, group: HeadGroup) -> _Inputs:
        sizes = (group.batch.stop - group.batch.start, group.query.stop - group.query.start)
        if sizes == (self.query.shape[0], self.query.shape[1]):
            return self
        batch, query, key = group
        sliced: dict[str, Tensor | None] = {"query": self.query[batch, query], "key": self.key[batch, key]}
        for name, index in (("value", (batch, key)), ("attention_mask", batch), ("offset", batch), ("sinks", query)):
            tensor = getattr(self, name)
            sliced[name] = None if tensor is None else tensor[index]
        return self.with_fields(**sliced)

    def prepared(self) -> SparseInputs:
        """For attention: detached unless gradients are needed, and zero where no token is, as a weight of 0 does not hide NaN."""
        query, key, value, sinks = self.query, self.key, self.value, self.sinks
        if not self.needs_grad:
            # FlexAttention's CPU kernel refuses leaves that require gradients even where gradients are off
            query, key = query.detach(), key.detach()
            value, sinks = (None if x is None else x.detach() for x in (value, sinks))
        absent = None if self.attention_mask is None else ~self.attention_mask
        if self.offset is not None:
            behind = torch.arange(key.shape[2], device=key.device) >= (self.offset + query.shape[2]).unsqueeze(-1)
            absent = behind if absent is None else absent | behind
        if absent is not None:
            absent = absent[:, None, :, None]
            # not masked_fill, which copies first
            key = torch.where(absent, 0.0, key) if self.needs_grad else key
            value = None if value is None else torch.where(absent, 0.0, value)
        return self.with_offset().with_fields(query=query, key=key, value=value, sinks=sinks)

    def with_offset(self) -> SparseInputs:
        """For a mask only: as they are."""
        batch, q_len, kv_len = self.query.shape[0], self.query.shape[2], self.key.shape[2]
        if self.offset is not None or q_len == kv_len:
            return cast("SparseInputs", self)
        offset = torch.full((batch,), kv_len - q_len, dtype=torch.int32, device=self.query.device)
        return cast("SparseInputs", self.with_fields(offset=offset))

    def with_fields(self: _Inputs, **fields: Any) -> _Inputs:
        """The same with other values in some fields; torch 2.5 cannot trace `_replace`."""
        values = {name: fields[name] if name in fields else getattr(self, name) for name in _FIELDS}
        return cast("_Inputs", AttentionInputs(**values))


_FIELDS = AttentionInputs._fields
SparseInputs = NewType("SparseInputs", AttentionInputs)
"""Inputs from `prepared` or `with_offset`: `offset` is a tensor, or None where row 0 stands at position 0."""


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
) -> AttentionInputs:
    """Check the arguments of a public function and fill in their defaults; query, key and value follow autocast."""
    query, key, value = in_autocast_dtype(query), in_autocast_dtype(key), None if value is None else in_autocast_dtype(value)
    scale, softcap, window, q_offset = (plain_number(x) for x in (scale, softcap, window, q_offset))
    check_inputs(query, key, value, {"scale": scale, "softcap": softcap}, window, attention_mask, q_offset, sinks)
    batch, most, offset = query.shape[0], key.shape[2] - query.shape[2], None
    # int32 as the indices of a mask_mod: the FLASH backend refuses a mixture
    if isinstance(q_offset, Tensor):
        # a plain clone would keep a stride of 0, which Inductor's C++ kernel cannot read
        offset = q_offset.clamp(0, most).to(torch.int32).expand(batch).clone(memory_format=torch.contiguous_format)
    elif q_offset is not None:
        offset = torch.full((batch,), q_offset, dtype=torch.int32, device=query.device)
    differentiable = (x for x in (query, key, value, sinks) if x is not None)
    return AttentionInputs(
        query,
        key,
        value,
        query.shape[3] ** -0.5 if scale is None else float(scale),
        None if softcap is None else float(softcap),
        window,
        # a copy: the mask outlives the call
        None if attention_mask is None else attention_mask != 0,
        offset,
        sinks,
        needs_grad=value is not None and torch.is_grad_enabled() and any(x.requires_grad for x in differentiable),
    )


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Switch autocast off on `device`."""
    if device.type in _DEVICES and torch.is_autocast_enabled(device.type):
        # as text: 2.5.1 cannot trace the generic alias
        return cast("contextlib.AbstractContextManager[None]", torch.autocast(device.type, enabled=False))
    return contextlib.nullcontext()


def in_autocast_dtype(tensor: Any) -> Any:
    """`tensor` in the dtype of autocast if that is on; what no call takes is left for the checks."""
    if isinstance(tensor, Tensor) and tensor.dtype in DTYPES:
        device = tensor.device.type
        if device in _DEVICES and torch.is_autocast_enabled(device):
            return tensor.to(torch.get_autocast_dtype(device))
    return tensor
