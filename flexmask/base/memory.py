"""Bytes of one head's mask while it is made."""

from __future__ import annotations

from flexmask._torch import is_traced
from flexmask.base.inputs import AttentionInputs
from flexmask.base.visibility import num_blocks

# per pair of blocks while lists are made, uncompiled: int64 places, int32 sums and lists, bool maps
_PAIR_BYTES = 40
_SCORE_BYTES = 12  # float32 twice, and the map of visible keys


def map_bytes(inputs: AttentionInputs, block_size: int, rows: int = 0) -> int:
    """Bytes of one head's map in one batch row while its lists are made, and of the scores of `rows` representative rows."""
    q_len, kv_len = inputs.query.shape[2], inputs.key.shape[2]
    return _PAIR_BYTES * num_blocks(q_len, block_size) * num_blocks(kv_len, block_size) + _SCORE_BYTES * rows * kv_len


def plain_bytes(inputs: AttentionInputs, block_size: int, by_pair: int, by_score: int) -> int:
    """Bytes that the plain steps take for one head, uncompiled: the most that was measured, rounded up.

    `by_pair` for each pair of blocks, `by_score` for each score of a representative row, and copies for block means.
    """
    (_, num_heads, q_len, head_dim), kv_len = inputs.query.shape, inputs.key.shape[2]
    groups = num_heads // inputs.key.shape[1]
    # a branch on symbolic lengths would add a graph, and torch 2.8 cannot add what compares them
    absent = is_traced() or inputs.attention_mask is not None or inputs.offset is not None or q_len != kv_len
    ragged = is_traced() or q_len % block_size != 0 or kv_len % block_size != 0
    copies = (inputs.query.element_size() < 4) + absent + ragged
    means = copies * 4 * head_dim * max(q_len, -(-kv_len // groups))
    pairs = num_blocks(q_len, block_size) * num_blocks(kv_len, block_size)
    return pairs * by_pair + block_size * kv_len * by_score + means
