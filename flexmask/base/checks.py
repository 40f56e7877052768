"""Checks of arguments; a message names the argument, what it must be and what came."""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexmask._torch import is_fake_outside, is_traced, is_under_vmap

# torch.compile traces no abstract class; NumPy's float64 is a float
_BUILTIN_TYPES = (int, float, bool, str, bytes, type(None))
# read here: torch 2.5.1 cannot trace it
_MAX_FLOAT = sys.float_info.max
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = range(16, 513)  # of the selections and of FlexAttention's kernels
GRADIENT_DIMS = 256  # the widest with gradients
_MAX_HEADS = 65535  # programs in the second dimension of a CUDA grid


def check_int(name: str, value: object) -> None:
    """Raise TypeError unless `value` is an integer and no bool."""
    if isinstance(value, bool) or not isinstance(plain_number(value), int):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r}")


def check_real(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless `value` is a finite number."""
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")
    # torch.compile can trace comparisons of a symbolic number
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be finite; got {value}")
    if isinstance(value, int) and not -_MAX_FLOAT <= value <= _MAX_FLOAT:
        raise ValueError(f"{name} must be a number that a float can hold; got one of {len(str(abs(value)))} digits")


def check_int64(name: str, value: Any, unit: str) -> None:
    """Raise TypeError unless `value` is an integer, ValueError if it exceeds int64: no tensor can be compared with it then."""
    check_int(name, value)
    if value >= 2**63:
        raise ValueError(f"{name} must be < 2**63 {unit}; got {value}")


def check_word(name: str, value: object, words: tuple[str | None, ...]) -> None:
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}; got {value!r}")


def check_shape(name: str, tensor: Tensor, layout: str) -> None:
    """Raise unless `tensor` is a tensor of nonempty dimensions, as many as `layout` names."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor {layout}; got {type(tensor).__name__}")
    check_strided(name, tensor)
    if tensor.dim() != layout.count(",") + 1:
        raise ValueError(f"{name} must be {layout}; got shape {tuple(tensor.shape)}")
    if 0 in tensor.shape:
        raise ValueError(f"{name} must not be empty; got shape {tuple(tensor.shape)}")


def is_integer(tensor: Tensor) -> bool:
    """True for an integer tensor; bool does not count."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_strided(name: str, tensor: Tensor) -> None:
    """Refuse sparse, nested, MKL-DNN and quantized tensors."""
    if is_traced():
        return
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        kind = "a nested" if tensor.is_nested else "a quantized" if tensor.is_quantized else f"a {tensor.layout}"
        raise TypeError(f"{name} must be a plain tensor; got {kind} tensor")


def check_plain(name: str, tensor: Tensor) -> None:
    """Refuse what `check_strided` refuses, DTensors, tensors on the meta device or in ``torch.vmap``, and stray fake tensors."""
    if is_traced():
        return
    check_strided(name, tensor)
    if type(tensor).__name__ == "DTensor":
        raise TypeError(
            f"{name} must be a plain tensor; got a DTensor: give each device its own heads, as to_local() returns them"
        )
    if is_under_vmap(tensor):
        raise TypeError(f"{name} must be a plain tensor; got one inside torch.vmap: give the batch as the first dimension")
    if tensor.device.type == "meta":
        raise ValueError(f"{name} must hold values; got a tensor on the meta device")
    if is_fake_outside(tensor):
        raise ValueError(f"{name} must be used under its FakeTensorMode; got a fake tensor outside of it")


def _check_like_query(name: str, tensor: Tensor, query: Tensor) -> None:
    """Raise unless `tensor` is plain, with query's dtype and device."""
    if tensor.dtype != query.dtype:
        raise TypeError(f"{name} must have query's dtype {query.dtype}; got {tensor.dtype}")
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on query's device {query.device}; got {tensor.device}")
    check_plain(name, tensor)


def check_argument(name: str, x: Any, layout: str, shape: tuple[int, ...], kind: str, owner: str, like: Tensor) -> None:
    """Raise unless `x` is a tensor of `shape`, which `layout` spells out, of this kind, and on the device of `like`.

    A `kind` other than ``"floating"`` is of integers or bool. `owner` is the name of `like`.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor or None; got {type(x).__name__}")
    check_strided(name, x)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {layout} = {shape}; got {tuple(x.shape)}")
    if x.is_complex() or x.is_floating_point() != (kind == "floating"):
        raise TypeError(f"{name} must be {kind}; got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on {owner}'s device {like.device}; got {x.device}")


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    score_numbers: dict[str, float | None],
    window: int | None,
    attention_mask: Tensor | None,
    q_offset: int | Tensor | None,
    sinks: Tensor | None,
    prompt_len: int | None,
) -> None:
    """Check the arguments that every public function shares, reading no values; `score_numbers` are scale and softcap."""
    _check_query_key(query, key)
    if value is not None:
        _check_value(value, key)
    for name, number in score_numbers.items():
        if number is not None:
            check_real(name, number)
            if number <= 0:
                raise ValueError(f"{name} must be > 0; got {number}")
    if window is not None:
        check_int64("window", window, "tokens")
        if window < 1:
            raise ValueError(f"window must be >= 1 token (the row's own position counts); got {window}")
    if attention_mask is not None:
        shape = (key.shape[0], key.shape[2])
        check_argument("attention_mask", attention_mask, "(batch, kv_len)", shape, "bool or integer, 1 = token", "key", key)
    _check_q_offset(q_offset, query, key)
    if sinks is not None:
        check_argument("sinks", sinks, "(num_heads,)", (query.shape[1],), "floating", "query", query)
    check_prompt_len(prompt_len)


def check_prompt_len(prompt_len: int | None) -> None:
    if prompt_len is not None:
        check_int64("prompt_len", prompt_len, "tokens")
        if prompt_len < 1:
            raise ValueError(f"prompt_len must be >= 1 token; got {prompt_len}")


def _check_query_key(query: Tensor, key: Tensor) -> None:
    check_shape("query", query, "(batch, num_heads, q_len, head_dim)")
    check_shape("key", key, "(batch, num_kv_heads, kv_len, head_dim)")
    check_plain("query", query)
    if query.dtype not in DTYPES:
        raise TypeError(f"query must be float32, float16 or bfloat16; got {query.dtype}")
    _check_like_query("key", key, query)
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
    if query.is_cuda and batch * num_heads > _MAX_HEADS:
        raise ValueError(f"query must have at most {_MAX_HEADS} heads in all batch rows on CUDA; got {batch} * {num_heads}")


def _check_value(value: Tensor, key: Tensor) -> None:
    check_shape("value", value, "(batch, num_kv_heads, kv_len, v_head_dim)")
    _check_like_query("value", value, key)
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value must have key's batch, num_kv_heads and kv_len {tuple(key.shape[:3])}; got {tuple(value.shape[:3])}"
        )
    if not HEAD_DIMS[0] <= value.shape[3] <= HEAD_DIMS[-1]:
        raise ValueError(f"value must have a v_head_dim from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}; got {value.shape[3]}")


def _check_q_offset(q_offset: int | Tensor | None, query: Tensor, key: Tensor) -> None:
    if q_offset is None:
        return
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    if isinstance(q_offset, Tensor):
        check_strided("q_offset", q_offset)
        if tuple(q_offset.shape) not in ((), (batch,)):
            raise ValueError(f"q_offset must be a 0-d or ({batch},) tensor; got shape {tuple(q_offset.shape)}")
        if not is_integer(q_offset):
            raise TypeError(f"q_offset must be an integer tensor; got {q_offset.dtype}")
        if q_offset.device != key.device:
            raise ValueError(f"q_offset must be on key's device {key.device}; got {q_offset.device}")
    else:
        check_offset(q_offset, q_len, kv_len)


def check_offset(q_offset: int, q_len: int, kv_len: int) -> None:
    """Raise unless rows that begin at `q_offset` end within the keys."""
    check_int("q_offset", q_offset)
    if not 0 <= q_offset <= kv_len - q_len:
        raise ValueError(f"q_offset must be in [0, kv_len - q_len = {kv_len - q_len}]; got {q_offset}")


def plain_number(value: Any) -> Any:
    """`value` as an int if it is an integer, as a float if it is another real number; anything else, bool too, as it is."""
    if type(value) in _BUILTIN_TYPES or isinstance(value, (bool, Tensor)):
        return value
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    return float(value) if isinstance(value, numbers.Real) else value


def plain_numbers(value: Any) -> Any:
    """Apply `plain_number`, also inside sequences and arrays, which come back as tuples; tensors stay tensors."""
    if type(value) in _BUILTIN_TYPES or isinstance(value, (str, bytes, Tensor)):
        return value
    if hasattr(value, "__array__") and hasattr(value, "tolist") and not isinstance(value, numbers.Number):
        value = value.tolist()
    return tuple(plain_numbers(part) for part in value) if isinstance(value, Sequence) else plain_number(value)
