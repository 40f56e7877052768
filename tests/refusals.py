"""Arguments that are accepted, and lists of changes to them that are refused."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

LAYOUT = {
    "query": "(batch, num_heads, q_len, head_dim)",
    "key": "(batch, num_kv_heads, kv_len, head_dim)",
    "value": "(batch, num_kv_heads, kv_len, v_head_dim)",
}


def right() -> dict[str, Any]:
    return {"query": zeros(2, 4, 64, 32), "key": zeros(2, 2, 96, 32), "value": zeros(2, 2, 96, 48), "block_size": 32}


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


# what differs from right(), exception, message
Refusals = list[tuple[dict[str, Any], type[Exception], str]]


def refused_values(error: type[Exception], message: str, names: Sequence[str], values: Iterable[Any]) -> Refusals:
    """Each value of each option; `message` may hold {name}, {got}, {type}, {dtype}, {shape} and its first {sizes}."""

    def said(name: str, x: Any) -> str:
        tensor = {"shape": tuple(x.shape), "sizes": tuple(x.shape[:3]), "dtype": x.dtype} if isinstance(x, Tensor) else {}
        return message.format(name=name, got=x, type=type(x).__name__, **tensor)

    return [({name: x}, error, said(name, x)) for name in names for x in values]


def ids(refusals: Refusals) -> list[str]:
    def shown(x: Any) -> str:
        return f"{x.dtype} {tuple(x.shape)} {x.device}" if isinstance(x, Tensor) else str(x)

    return [", ".join(f"{name}={shown(x)}" for name, x in changes.items()) for changes, *_ in refusals]
