"""Sizes of the calls that compile everything: rows of a chunk, and tokens up to its end."""

from __future__ import annotations

import torch

from flexmask.integrations.serving.layers import SparseLayer
from flexmask.warming import MANY_BLOCKS

Size = tuple[int, int]
# tokens, as in flexmask.warmup; the second length makes sizes dynamic
_LENGTHS = (1100, 2300)
# rows; FlexAttention compiles shorter calls separately
_SHORT = 128
# lengths tried for the number of heads per mask
_STEPS = 64


def warm_sizes(layer: SparseLayer, largest: Size, device: torch.device) -> list[Size]:
    """Whole prompts and chunks of each kind; long ones do not exceed `largest`."""
    sizes = [(rows, length) for length in _LENGTHS for rows in (length, length // 2)] + _short_sizes(layer)
    if device.type == "cuda":
        longest = [min(blocks * layer.selector.block_size, largest[1]) for blocks in MANY_BLOCKS]
        sizes += [(min(rows, largest[0]), length) for length in longest for rows in (length, length // 2)]
        sizes += grouped_sizes(layer, largest, device)
    return list(dict.fromkeys(sizes))


def _short_sizes(layer: SparseLayer) -> list[Size]:
    """Chunks of one block, whose size torch compiles as a constant, and below `_SHORT`."""
    block = layer.selector.block_size
    rows = [block] if block >= _SHORT else [block, _SHORT - 1]
    whole = [(each, each) for each in rows if each >= layer.dense_below]
    return [(each, _LENGTHS[0]) for each in rows] + whole


def grouped_sizes(layer: SparseLayer, largest: Size, device: torch.device) -> list[Size]:
    """Two calls per number of heads that `max_mask_bytes` gives long calls; the first compiles for its exact size."""
    block, (most_rows, most_tokens) = layer.selector.block_size, largest
    found: dict[tuple[int, bool], list[Size]] = {}
    step = max(most_tokens // _STEPS, 2 * block)
    for tokens in range(most_tokens, 4 * block, -step):
        whole = [(tokens, tokens)] if tokens <= most_rows else []
        for size in (*whole, (min(most_rows, tokens - 2 * block), tokens)):
            heads = heads_together(layer, size, device)
            if heads < layer.num_heads:
                found.setdefault((heads, size[0] == tokens), []).append(size)
    # the middle, where a shorter call is of the same kind
    middle = [sizes[(len(sizes) - 1) // 2] for sizes in found.values()]
    return [call for rows, tokens in middle for call in ((rows, tokens), _shorter(rows, tokens, block))]


def _shorter(rows: int, tokens: int, block: int) -> Size:
    """A call of the same kind, shorter by different numbers of blocks."""
    return (rows - block, tokens - block) if rows == tokens else (max(rows - 2 * block, rows // 2), tokens - block)


def heads_together(layer: SparseLayer, size: Size, device: torch.device) -> int:
    """Query heads per mask."""
    inputs = layer.inputs_of(*size, device)
    group = layer.selector.for_inputs(inputs).groups(inputs, layer.call_options.max_mask_bytes)[0]
    return group.query.stop - group.query.start
