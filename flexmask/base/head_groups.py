"""Groups of the heads of a call, and the memory of their masks, by which groups are formed."""

from __future__ import annotations

from torch import Tensor

from flexmask._torch import is_traced
from flexmask.base.inputs import AttentionInputs, HeadGroup

# per pair of blocks while lists are made, uncompiled: int64 places, int32 sums and lists, bool maps
_PAIR_BYTES = 40
_SCORE_BYTES = 12  # float32 twice, and the map of visible keys


def head_groups(query: Tensor, key: Tensor, at_once: int | None, whole_batch_rows: bool = False) -> list[HeadGroup]:
    """Groups of equal size, each of one to `at_once` heads (None: all); with `whole_batch_rows` all of a batch row."""
    batch, num_heads, num_kv_heads = query.shape[0], query.shape[1], key.shape[1]
    if at_once is None:
        at_once = batch * num_heads
    elif whole_batch_rows:
        at_once = max(at_once, num_heads)
    queries_per_kv = num_heads // num_kv_heads
    rows = _largest_divisor(batch, at_once // num_heads)
    keys = _largest_divisor(num_kv_heads, at_once // queries_per_kv)
    queries = keys * _largest_divisor(queries_per_kv, at_once)
    return [
        HeadGroup(slice(b, b + rows), slice(h, h + queries), slice(h // queries_per_kv, h // queries_per_kv + keys))
        for b in range(0, batch, rows)
        for h in range(0, num_heads, queries)
    ]


def _largest_divisor(number: int, limit: int) -> int:
    """Largest divisor of `number` up to `limit`, at least 1."""
    if limit >= number:
        return number
    # a list: torch 2.8 cannot trace max of a generator
    return max([d for d in range(1, number + 1) if number % d == 0 and d <= max(1, limit)])


def map_bytes(inputs: AttentionInputs, block_size: int, rows: int = 0) -> int:
    """Bytes of one head's map in one batch row while its lists are made, and of the scores of `rows` representative rows."""
    return _PAIR_BYTES * inputs.num_block_pairs(block_size) + _SCORE_BYTES * rows * inputs.key.shape[2]


def plain_bytes(inputs: AttentionInputs, block_size: int, by_pair: int, by_score: int) -> int:
    """Bytes that plain steps take for a head: `by_pair` of blocks, `by_score` of representative rows, copies for block means."""
    (_, num_heads, q_len, head_dim), kv_len = inputs.query.shape, inputs.key.shape[2]
    queries_per_kv = num_heads // inputs.key.shape[1]
    # a branch on symbolic lengths would add a graph, and torch 2.8 cannot add what compares them
    copies_absent = is_traced() or inputs.attention_mask is not None or inputs.offset is not None or q_len != kv_len
    copies_ragged = is_traced() or q_len % block_size != 0 or kv_len % block_size != 0
    copies = (inputs.query.element_size() < 4) + copies_absent + copies_ragged
    means = copies * 4 * head_dim * max(q_len, -(-kv_len // queries_per_kv))
    return inputs.num_block_pairs(block_size) * by_pair + block_size * kv_len * by_score + means


def flash_key_tile(head_dim: int, v_head_dim: int) -> int:
    """Keys that FLASH takes at a time on Hopper: its own tile, or 64 where no block size is a multiple of that."""
    return 128 if head_dim <= 128 or (head_dim <= 192 and v_head_dim <= 128) else 64


def tiled_list_bytes(inputs: AttentionInputs, block_size: int) -> int:
    """Bytes of one head's lists by block and by tile in one batch row; 0 where FLASH takes the blocks as they are."""
    if inputs.value is None or not inputs.query.is_cuda:
        return 0
    tile = flash_key_tile(inputs.query.shape[3], inputs.value.shape[3])
    if block_size <= tile or block_size % tile:
        return 0
    return 8 * inputs.num_block_pairs(block_size) * (1 + block_size // tile)
