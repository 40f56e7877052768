"""Sparse attention of one request's chunk, in the engine's layout, and the keys that it reads."""

from __future__ import annotations

from torch import Tensor

from flexmask.attend import attend as attend_blocks
from flexmask.base.inputs import attention_inputs
from flexmask.integrations.serving.layers import SparseLayer
from flexmask.stats import SelectionStats


def attend(
    layer: SparseLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    statistics: tuple[str, ...] = (),
) -> tuple[Tensor, SelectionStats | None]:
    """Causal attention of a chunk whose last row stands at the last key, at any length, and the statistics of these names.

    `query` is (rows, num_heads, head_dim), `key` and `value` are contiguous (num_kv_heads, tokens, head_dim), `sinks`
    (num_heads,). Returns (rows, num_heads, v_head_dim).
    """
    # contiguous as in the warm-up: kernels are compiled for the memory layout
    inputs = attention_inputs(
        query.contiguous().transpose(0, 1)[None], key[None], value[None],
        scale=layer.scale, softcap=layer.softcap, window=layer.window, sinks=sinks,
    )  # fmt: skip
    selector = layer.selector.for_inputs(inputs)
    plan = layer.run.policy.plan(inputs, selector)
    found = attend_blocks(inputs, selector, layer.run, plan, statistics=statistics)
    return found.out[0].transpose(0, 1), found.stats


def after_cached(cached: Tensor | None, chunk: Tensor, scale: Tensor | float | None = None, skipped: int = 0) -> Tensor:
    """A request's keys or values up to its chunk's end, (num_kv_heads, tokens, head_dim) and contiguous.

    `cached` is (num_kv_heads, cached_len - skipped, head_dim), None for a first chunk; `chunk` is (rows, num_kv_heads, head_dim)
    and copied as it is. An FP8 cache holds numbers divided by `scale`, one number or one per key head; products are rounded once.
    The first `skipped` tokens, which the chunk does not see, are zero; `cached` begins behind them.
    """
    cached_len = skipped if cached is None else skipped + cached.shape[1]
    out = chunk.new_empty((chunk.shape[1], cached_len + chunk.shape[0], chunk.shape[2]))
    out[:, cached_len:] = chunk.transpose(0, 1)
    out[:, :skipped] = 0
    if cached is not None:
        earlier = out[:, skipped:cached_len]
        earlier.copy_(cached)
        if scale is not None:
            # with dimensions, in which a float32 scale is not rounded to the dtype of the rows
            earlier.mul_(scale if isinstance(scale, float) else scale.view(-1, 1, 1))
    return out
