"""Sparse attention of one request's chunk, in the engine's layout."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.attention import attention_to_kept
from flexmask.base.inputs import attention_inputs
from flexmask.gallery import sparse_attention
from flexmask.integrations.vllm.layers import SparseLayer


def attend(
    layer: SparseLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, count_density: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of a chunk whose last row stands at the last key; sparse at any length, which the plan of a step decides.

    Parameters
    ----------
    layer
        Its options.
    query
        (rows, num_heads, head_dim), a slice of the packed batch.
    key, value
        (num_kv_heads, tokens, head_dim), contiguous, tokens >= rows.
    sinks
        (num_heads,), as in `flexprefill_attention`.
    count_density
        Also return the mean density of the heads, a 0-d tensor; of FlexPrefill's masks only.

    Returns
    -------
    Tensor
        (rows, num_heads, head_dim).
    Tensor
        The density, or None.
    """
    settings = layer.settings
    # rows without gaps, as the warm-up has them: the memory layout is a part of what is compiled. The output comes in the same
    tensors = (query.contiguous().transpose(0, 1)[None], key[None], value[None])
    scores: dict[str, Any] = {"scale": layer.scale, "softcap": layer.softcap, "window": layer.window, "sinks": sinks}
    if settings.method != "flexprefill":
        run = {"backend": settings.backend, "dense_below": 0, "max_mask_bytes": settings.max_mask_bytes}
        options = {"block_size": layer.config.block_size, **settings.method_options}
        out = sparse_attention(*tensors, settings.method, **{**scores, **run, **options})
        assert isinstance(out, Tensor)
        return out[0].transpose(0, 1), None
    inputs = attention_inputs(*tensors, gamma=layer.config.gamma, **scores)
    limits = (settings.max_mask_bytes, settings.break_even > 0)
    kept = _KeptBlocks() if count_density else None
    out, _, _ = attention_to_kept(inputs, layer.config, settings.backend, *limits, masks=kept)
    if kept is None:
        return out[0].transpose(0, 1), None
    seen = layer.num_heads * visible_blocks(query.shape[0], key.shape[1], layer.config.block_size, layer.window)
    return out[0].transpose(0, 1), (kept.number.double() / seen).float()


class _KeptBlocks(list[BlockMask]):
    """Counts the blocks of the masks that it is given, and lets go of them: all groups of heads together exceed `max_mask_bytes`.

    The statistics of a search have the density too, among others that take longer to compute.
    """

    number: Any = 0

    def append(self, mask: BlockMask) -> None:
        full = mask.full_kv_num_blocks
        self.number = self.number + mask.kv_num_blocks.sum() + (0 if full is None else full.sum())


@functools.lru_cache(maxsize=64)
def visible_blocks(rows: int, tokens: int, block_size: int, window: int | None) -> int:
    """Pairs of blocks that one head sees of a chunk of `rows` whose last row stands at the last of `tokens` keys."""
    offset, found = tokens - rows, 0
    for start in range(0, rows, block_size):
        last = offset + min(start + block_size, rows) - 1
        first = 0 if window is None else max(offset + start - window + 1, 0)
        found += last // block_size - first // block_size + 1
    return found
