"""Every public call that needs torch only, and the engines' attention, small and on few compiled kernels."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask import SelectionStats, sparse_attention, sparse_attention_varlen, warmup
from flexmask.block_masks import causal_mask
from flexmask.integrations.serving.chunk import attend_chunk
from flexmask.integrations.serving.layers import LayerShape, SparseLayer, role_of_shape
from flexmask.integrations.serving.startup import warm_up
from flexmask.settings import PrefillSettings
from tests.attention_calls import SINKS
from tests.block_masks.definitions import MASKS, SPARSE
from tests.cases import structured_inputs
from tests.compile_support import lists_of

OPTIONS: dict[str, Any] = {"gamma": 0.6, "block_size": 32, "min_budget": 0}
BOUNDS = [0, 96, 160, 256]
BOUNDS_TENSOR = torch.tensor(BOUNDS)
PADDING = torch.ones(1, 256, dtype=torch.int64)
PADDING[:, :40] = 0


@functools.cache
def inputs(length: int = 256, head_dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    query, key = structured_inputs(generator, 1, 4, 2, length, length, head_dim, 2.0)
    return query, key, torch.randn(1, 2, length, head_dim, generator=generator)


def attention(*given: Tensor, **options: Any) -> Any:
    query, key, value = given or inputs()
    return sparse_attention(query, key, value, **{"dense_below": 0, **OPTIONS, **options})


def varlen(bounds: Any, *given: Tensor, **options: Any) -> Any:
    query, key, value = (x[0].transpose(0, 1) for x in given or inputs())
    return sparse_attention_varlen(query, key, value, bounds, **{"dense_below": 65, **OPTIONS, **options})


def users(query: Tensor, key: Tensor, **options: Any) -> BlockMask:
    mask: BlockMask = causal_mask(query, key, **options)
    return mask


def mask(name: str, *given: Tensor, **options: Any) -> Any:
    query, key, _ = given or inputs()
    return MASKS[name](query, key, block_size=32, return_stats=True, **SPARSE[name], **options)


def layer(head_dim: int = 16) -> SparseLayer:
    shape = LayerShape(num_heads=4, num_kv_heads=2, head_dim=head_dim, v_head_dim=head_dim, scale=0.25)
    found = role_of_shape(shape, 0, PrefillSettings(**OPTIONS))
    assert isinstance(found, SparseLayer)
    return found


def engines(rows: int, *given: Tensor) -> Any:
    query, key, value = (x[0] for x in given or inputs())
    return attend_chunk(layer(key.shape[-1]), query[:, -rows:].transpose(0, 1), key, value, statistics=("density",)).as_returned()


def engines_start() -> None:
    warm_up([layer()], (256, 256), torch.device("cpu"), torch.float32, True)


EVERYTHING: dict[str, Any] = {"attention_mask": PADDING, "window": 200, "softcap": 20.0}
# of query, key and value of 256 tokens and head_dim 16, by default `inputs()`
UNCOMPILED: dict[str, Callable[..., Any]] = {
    "dense": functools.partial(attention, dense_below=None, return_stats=True),
    "dense, padded window": functools.partial(attention, dense_below=None, attention_mask=PADDING, window=100),
    "dense, written out": functools.partial(attention, dense_below=None, softcap=3.0, sinks=SINKS, return_lse=True),
    "packed, dense": functools.partial(varlen, BOUNDS_TENSOR, dense_below=None),
    **{f"mask of {name}": functools.partial(mask, name) for name in MASKS},
    **{f"padded window of {name}": functools.partial(mask, name, **EVERYTHING) for name in ("flexprefill", "hybrid")},
    "query-aware, capped": functools.partial(mask, "flexprefill", tau=1.0, max_budget=128),
}
COMPILED: dict[str, Callable[..., Any]] = {
    "sparse": attention,
    "sparse, statistics": functools.partial(attention, return_stats=True),
    "sparse, padded window": functools.partial(attention, attention_mask=PADDING, window=100),
    "a user's method": lambda: sparse_attention(*inputs(), users, block_size=32, dense_below=0),
    "packed": functools.partial(varlen, BOUNDS),
    "packed, bounds in a tensor": functools.partial(varlen, BOUNDS_TENSOR),
    "warmup": lambda: warmup(4, 2, 16, dtype=torch.float32, device="cpu", **OPTIONS),
    "engines: a prompt": functools.partial(engines, 256),
    "engines: a chunk": functools.partial(engines, 100),
    "engines: start": engines_start,
}


def tensors_of(found: Any) -> list[Tensor]:
    if isinstance(found, BlockMask):
        found = lists_of(found)
    elif isinstance(found, SelectionStats):
        found = tuple(vars(found).values())
    if isinstance(found, (tuple, list)):
        return [tensor for each in found for tensor in tensors_of(each)]
    return [found] if isinstance(found, Tensor) else []


def results(calls: dict[str, Callable[..., Any]]) -> dict[str, list[Tensor]]:
    return {name: tensors_of(call()) for name, call in calls.items()}


def assert_same_results(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=0, atol=0, equal_nan=True)
