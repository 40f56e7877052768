"""Memory that a mask takes, and groups of heads that keep attention within a limit."""

from __future__ import annotations

import torch

from flexmask.base.inputs import AttentionInputs, HeadGroup
from flexmask.base.visibility import num_blocks
from flexmask.config import FlexPrefillConfig
from flexmask.search import runs_kernels


def head_bytes(inputs: AttentionInputs, config: FlexPrefillConfig) -> int:
    """Bytes that the mask of one head of one batch row takes while it is made, by the search that runs for `inputs`."""
    if runs_kernels(inputs, config):
        return mask_bytes(inputs.query.shape[2], inputs.key.shape[2], config)
    return plain_mask_bytes(inputs, config)


def plain_mask_bytes(inputs: AttentionInputs, config: FlexPrefillConfig) -> int:
    """Bytes that the mask of one head takes while the plain steps make it, uncompiled; the most that was measured, rounded up.

    Each pair of blocks takes up to 72 bytes (indices of sorts are int64), 56 where no head may be query-aware, 80 in hybrid
    selection, which sums a few maps. The attention of the representative rows is written out: float32, and again to part it into
    blocks, with its map of visible keys. Block means copy queries and keys where they are of half precision, padded or no whole
    blocks.
    """
    (groups, q_len, head_dim), kv_len = _shape(inputs), inputs.key.shape[2]
    pairs = num_blocks(q_len, config.block_size) * num_blocks(kv_len, config.block_size)
    by_score = 12 if inputs.softcap is None else 18
    if config.selection == "reference":
        by_score = 32  # sums by offset take int64 indices
    if config.pattern_queries != config.index_queries:
        by_score += 4
    absent = inputs.attention_mask is not None or inputs.offset is not None
    ragged = q_len % config.block_size != 0 or kv_len % config.block_size != 0
    copies = (inputs.query.dtype != torch.float32) + absent + ragged
    means = copies * 4 * head_dim * max(q_len, -(-kv_len // groups))
    per_pair = 80 if config.selection == "hybrid" else 72 if config.tau > 0 else 56
    return pairs * per_pair + config.block_size * kv_len * by_score + means


def _shape(inputs: AttentionInputs) -> tuple[int, int, int]:
    """Query heads to a key head, q_len and head_dim."""
    _, num_heads, q_len, head_dim = inputs.query.shape
    return num_heads // inputs.key.shape[1], q_len, head_dim


def mask_bytes(q_len: int, kv_len: int, config: FlexPrefillConfig) -> int:
    """Bytes that the mask of one head of one batch row takes while it is made, by the kernels that run on CUDA.

    Each pair of blocks takes two int32 list entries and a byte of the map of kept blocks; where heads may be query-aware, a
    float32 of the pooled map and another byte, which hybrid selection needs too. Each representative row takes four float32 by
    key block. Not counted: the lists by key block that gradients need.
    """
    num_q_blocks, num_kv_blocks = num_blocks(q_len, config.block_size), num_blocks(kv_len, config.block_size)
    rows = config.block_size * (1 if config.pattern_queries == config.index_queries else 2)
    per_pair = 10 if config.selection == "hybrid" else 14 if config.tau > 0 else 9
    return num_kv_blocks * (num_q_blocks * per_pair + rows * 16)


def head_groups(batch: int, num_heads: int, num_kv_heads: int, at_once: int) -> list[HeadGroup]:
    """Groups of equal size of at most `at_once` heads; at least one query head each.

    Batch rows are parted first, then key heads with their query heads, then the query heads of one key head.
    """
    groups = num_heads // num_kv_heads
    rows = _largest_divisor(batch, at_once // num_heads)
    keys = num_kv_heads if at_once >= num_heads else _largest_divisor(num_kv_heads, at_once // groups)
    queries = keys * groups if at_once >= groups else _largest_divisor(groups, at_once)
    return [
        HeadGroup(slice(b, b + rows), slice(h, h + queries), slice(h // groups, h // groups + keys))
        for b in range(0, batch, rows)
        for h in range(0, num_heads, queries)
    ]


def _largest_divisor(number: int, limit: int) -> int:
    """Largest divisor of `number` that is at most `limit`; 1 where the limit is less."""
    # a list: torch 2.8 does not trace max of a generator with a default
    return max([d for d in range(1, number + 1) if number % d == 0 and d <= max(1, limit)])
