"""Keys or values of one request: cached ones, then those of the step."""

from __future__ import annotations

from torch import Tensor


def after_cached(cached: Tensor | None, own: Tensor, scale: Tensor | float | None = None) -> Tensor:
    """A request's keys or values up to its chunk's end, (num_kv_heads, tokens, head_dim) and contiguous.

    `cached` is (num_kv_heads, tokens before the chunk, head_dim), None for a first chunk; `own` is (rows, num_kv_heads, head_dim)
    and copied as it is. An FP8 cache holds numbers divided by `scale`, one number or one per key head; products are rounded once.
    """
    before = 0 if cached is None else cached.shape[1]
    made = own.new_empty((own.shape[1], before + own.shape[0], own.shape[2]))
    made[:, before:] = own.transpose(0, 1)
    if cached is not None:
        made[:, :before] = cached
        if scale is not None:
            # with dimensions, in which a float32 scale is not rounded to the dtype of the rows
            made[:, :before].mul_(scale if isinstance(scale, float) else scale.view(-1, 1, 1))
    return made
