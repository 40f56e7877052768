"""One attention problem, checked once at the public boundary and passed whole to everything below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmask.base.checks import check_int, check_int64, check_like_query, check_plain, check_real, check_shape
from flexmask.base.gammas import gamma_by_head

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_HEADS = 65535  # programs in the second dimension of a CUDA grid

HEAD_DIMS = range(16, 257)  # of the search and of FlexAttention's kernels


class HeadGroup(NamedTuple):
    """Batch rows, query heads and key heads that are searched and attended to in one go."""

    batch: slice
    query: slice
    key: slice


class AttentionInputs(NamedTuple):
    """The tensors and numbers of one causal attention call.

    Query row t stands at position ``offset + t``. It sees key k iff both are tokens, ``0 <= position - k`` and, with a window,
    ``position - k < window``. Make one with `attention_inputs`, which checks and fills in the defaults.
    """

    query: Tensor  # (batch, num_heads, q_len, head_dim)
    key: Tensor  # (batch, num_kv_heads, kv_len, head_dim)
    value: Tensor | None  # (batch, num_kv_heads, kv_len, v_head_dim); None where only a mask is made
    scale: float
    softcap: float | None = None
    window: int | None = None  # tokens, the row's own counted
    attention_mask: Tensor | None = None  # (batch, kv_len) bool, True = token; None: all are
    offset: Tensor | None = None  # (batch,) int32, clamped; None: the last row stands at the last key
    sinks: Tensor | None = None  # (num_heads,) floating
    # (batch,) integer, >= 1: query rows, from the first, that decide; None: all. What comes after may be padding that no mask
    # tells of: it stays visible and attends, but the blocks are chosen as if it were padding. Only without attention_mask
    deciding: Tensor | None = None
    # share that each head keeps: a tuple of num_heads numbers, or (num_heads,) of `widest_float`, clamped; None: the config's
    gamma: tuple[float, ...] | Tensor | None = None

    def of_heads(self, group: HeadGroup) -> AttentionInputs:
        """The same problem for a group of heads, as views."""
        value, mask, offset, sinks = self.value, self.attention_mask, self.offset, self.sinks
        deciding, gamma = self.deciding, self.gamma
        return AttentionInputs(
            self.query[group.batch, group.query],
            self.key[group.batch, group.key],
            None if value is None else value[group.batch, group.key],
            self.scale,
            self.softcap,
            self.window,
            None if mask is None else mask[group.batch],
            None if offset is None else offset[group.batch],
            None if sinks is None else sinks[group.query],
            None if deciding is None else deciding[group.batch],
            None if gamma is None else gamma[group.query],
        )

    def detached(self) -> AttentionInputs:
        """The same tensors outside of autograd."""
        value, sinks = self.value, self.sinks
        return AttentionInputs(
            self.query.detach(),
            self.key.detach(),
            None if value is None else value.detach(),
            self.scale,
            self.softcap,
            self.window,
            self.attention_mask,
            self.offset,
            None if sinks is None else sinks.detach(),
            self.deciding,
            self.gamma,
        )

    def placed(self) -> AttentionInputs:
        """With `offset` as a tensor wherever row 0 does not stand at position 0.

        A tensor, also where the host knows the number, so that another number is not another compilation.
        """
        batch, q_len, kv_len = self.query.shape[0], self.query.shape[2], self.key.shape[2]
        if self.offset is not None or q_len == kv_len:
            return self
        offset = torch.full((batch,), kv_len - q_len, dtype=torch.int32, device=self.query.device)
        return self.with_fields(offset=offset)

    def deciding_tokens(self) -> Tensor | None:
        """The tokens that blocks are chosen by, (batch, kv_len) bool, of a placed problem; None: all are."""
        if self.deciding is None:
            return self.attention_mask
        end = self.deciding if self.offset is None else self.offset + self.deciding
        return torch.arange(self.key.shape[2], device=self.key.device) < end.unsqueeze(-1)

    def without_absent(self, keys: bool = True) -> AttentionInputs:
        """Zero the values (and the keys, with `keys`) of padding and of slots behind the last row of a chunk.

        A weight of 0 does not hide the memory there: 0 * NaN is NaN. Copies, but only where there may be such keys.
        """
        mask, offset = self.attention_mask, self.offset
        if mask is None and offset is None:
            return self
        absent = None if mask is None else ~mask
        if offset is not None:
            slot = torch.arange(self.key.shape[2], device=self.key.device)
            behind = slot >= (offset + self.query.shape[2]).unsqueeze(-1)
            absent = behind if absent is None else absent | behind
        assert absent is not None
        return self.with_zeros(absent, keys)

    def with_zeros(self, absent: Tensor, keys: bool = True) -> AttentionInputs:
        """Zero the values (and the keys, with `keys`) that are `absent`, (batch or 1, kv_len) bool."""
        absent = absent[:, None, :, None]
        # by torch.where: masked_fill copies first, and then fills
        key = torch.where(absent, 0.0, self.key) if keys else self.key
        value = None if self.value is None else torch.where(absent, 0.0, self.value)
        return self.with_fields(key=key, value=value)

    def with_query(self, query: Tensor) -> AttentionInputs:
        """The same problem for other query rows; the caller adjusts the offset."""
        return self.with_fields(query=query)

    def with_fields(self, **fields: Any) -> AttentionInputs:
        """The same problem with other values in some fields: torch 2.5 cannot trace `_replace`, 2.8 no slice of a named tuple."""
        return AttentionInputs(**{name: fields.get(name, getattr(self, name)) for name in _FIELDS})

    def with_gamma(self, gamma: float | Sequence[float]) -> AttentionInputs:
        """The same problem with a config's gamma for every head, unless it has gammas already; one number stays in the config."""
        if self.gamma is not None or not isinstance(gamma, tuple):
            return self
        return self.with_fields(gamma=gamma_by_head(gamma, self.query))

    def wants_gradients(self) -> bool:
        """True if gradients are on and an input requires them."""
        inputs = (self.query, self.key, self.value, self.sinks)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


_FIELDS = AttentionInputs._fields


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
    gamma: Any = None,
) -> AttentionInputs:
    """Check the arguments of a public function, which these are, and fill in their defaults.

    `gamma` matters where it is by head, as a tuple that a config has checked or as a tensor.

    DTensors and tensors of ``torch.vmap`` or of the meta device are refused. Only types, shapes, dtypes, devices and ranges are
    looked at: no value of a tensor is read back from its device.

    Raises
    ------
    TypeError, ValueError
        With the argument, what it must be and what was given.
    """
    _check_query_key(query, key)
    if value is not None:
        _check_value(value, key)
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None:
            check_real(name, number)
            if number <= 0:
                raise ValueError(f"{name} must be > 0; got {number}")
    if window is not None:
        check_int("window", window)
        check_int64("window", window, "tokens")
        if window < 1:
            raise ValueError(f"window must be >= 1 token (the row's own position counts); got {window}")
    _check_attention_mask(attention_mask, key)
    _check_q_offset(q_offset, query, key)
    _check_sinks(sinks, query)
    return AttentionInputs(
        query,
        key,
        value,
        query.shape[3] ** -0.5 if scale is None else float(scale),
        None if softcap is None else float(softcap),
        window,
        None if attention_mask is None else attention_mask != 0,  # a copy: the mask outlives the call
        _device_offset(q_offset, query, key),
        sinks,
        gamma=gamma_by_head(gamma, query),
    )


def _device_offset(q_offset: int | Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """`q_offset` as a clamped (batch,) int32 tensor, without a copy from the host; None where it is not given.

    int32, as the indices are that kernels hand to a mask_mod (the FLASH backend refuses a mixture).
    """
    batch, most = query.shape[0], key.shape[2] - query.shape[2]
    if q_offset is None:
        return None
    if isinstance(q_offset, Tensor):
        # contiguous by name: the clone of one expanded number keeps its stride of 0, which Inductor's C++ kernel cannot read
        return q_offset.clamp(0, most).to(torch.int32).expand(batch).clone(memory_format=torch.contiguous_format)
    return torch.full((batch,), q_offset, dtype=torch.int32, device=query.device)


def _check_query_key(query: Tensor, key: Tensor) -> None:
    check_shape("query", query, "(batch, num_heads, q_len, head_dim)")
    check_shape("key", key, "(batch, num_kv_heads, kv_len, head_dim)")
    check_plain("query", query)
    if query.dtype not in DTYPES:
        raise TypeError(f"query must be float32, float16 or bfloat16; got {query.dtype}")
    check_like_query("key", key, query)
    check_plain("key", key)
    batch, num_heads, q_len, head_dim = query.shape
    key_batch, num_kv_heads, kv_len, key_head_dim = key.shape
    if batch != key_batch:
        raise ValueError(f"key must have query's batch size {batch}; got {key_batch}")
    if head_dim != key_head_dim:
        raise ValueError(f"key must have query's head_dim {head_dim}; got {key_head_dim}")
    if not HEAD_DIMS[0] <= head_dim <= HEAD_DIMS[-1]:
        raise ValueError(f"query must have a head_dim from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}; got {head_dim}")
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"query's num_heads must be a multiple of key's num_kv_heads {num_kv_heads}; got {num_heads}")
    if q_len > kv_len:
        raise ValueError(f"query's q_len must be at most key's kv_len {kv_len}; got {q_len}")
    if query.is_cuda and batch * num_heads > _MOST_HEADS:
        raise ValueError(f"query must have at most {_MOST_HEADS} heads in all batch rows on CUDA; got {batch} * {num_heads}")


def _check_value(value: Tensor, key: Tensor) -> None:
    check_shape("value", value, "(batch, num_kv_heads, kv_len, v_head_dim)")
    check_like_query("value", value, key)
    check_plain("value", value)
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value must have key's batch, num_kv_heads and kv_len {tuple(key.shape[:3])}; got {tuple(value.shape[:3])}"
        )
    if not HEAD_DIMS[0] <= value.shape[3] <= HEAD_DIMS[-1]:
        raise ValueError(f"value must have a v_head_dim from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}; got {value.shape[3]}")


def _check_sinks(sinks: Tensor | None, query: Tensor) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks must be a tensor or None; got {type(sinks).__name__}")
    if tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(f"sinks must be (num_heads,) = ({query.shape[1]},); got {tuple(sinks.shape)}")
    if not sinks.is_floating_point():
        raise TypeError(f"sinks must be floating; got {sinks.dtype}")
    if sinks.device != query.device:
        raise ValueError(f"sinks must be on query's device {query.device}; got {sinks.device}")


def _check_attention_mask(attention_mask: Tensor | None, key: Tensor) -> None:
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor or None; got {type(attention_mask).__name__}")
    expected = (key.shape[0], key.shape[2])
    if attention_mask.dim() != 2 or tuple(attention_mask.shape) != expected:
        raise ValueError(f"attention_mask must be (batch, kv_len) = {expected}; got {tuple(attention_mask.shape)}")
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise TypeError(f"attention_mask must be bool or integer, 1 = token; got {attention_mask.dtype}")
    if attention_mask.device != key.device:
        raise ValueError(f"attention_mask must be on key's device {key.device}; got {attention_mask.device}")


def _check_q_offset(q_offset: int | Tensor | None, query: Tensor, key: Tensor) -> None:
    if q_offset is None:
        return
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    if isinstance(q_offset, Tensor):
        if tuple(q_offset.shape) not in ((), (batch,)):
            raise ValueError(f"q_offset must be a 0-d or ({batch},) tensor; got shape {tuple(q_offset.shape)}")
        if q_offset.is_floating_point() or q_offset.is_complex() or q_offset.dtype == torch.bool:
            raise TypeError(f"q_offset must be an integer tensor; got {q_offset.dtype}")
        if q_offset.device != key.device:
            raise ValueError(f"q_offset must be on key's device {key.device}; got {q_offset.device}")
    else:
        check_int("q_offset", q_offset)
        if not 0 <= q_offset <= kv_len - q_len:
            raise ValueError(f"q_offset must be in [0, kv_len - q_len = {kv_len - q_len}]; got {q_offset}")
