"""Oracle calls small enough to work out by hand."""

from typing import Any

import torch

from tests.oracle.reference import reference

BLOCK = 16
NEVER = -1000.0  # next to a score of 0 the attention is exactly 0, in float64


def decide(scores, **options):
    """The oracle on given scores, (q_len, kv_len), for one head."""
    key = torch.eye(scores.shape[1], dtype=torch.float64)
    defaults: dict[str, Any] = {"gamma": 0.9, "tau": 0.0, "block_size": BLOCK, "min_budget": 0, "scale": 1.0}
    return reference(scores.double()[None, None], key[None, None], **{**defaults, **options})


def random_inputs(seed, q_len, kv_len, batch=1, num_heads=1, num_kv_heads=1, head_dim=16):
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(batch, num_heads, q_len, head_dim, generator=generator)
    key = torch.randn(batch, num_kv_heads, kv_len, head_dim, generator=generator)
    return query, key


def planted_slash(length, offset, low=NEVER):
    """All attention at the key `offset` before the row; rows before `offset` attend to all keys alike."""
    scores = torch.full((length, length), low)
    for row in range(offset, length):
        scores[row, row - offset] = 0.0
    return scores


def blocks(result, batch=0, head=0):
    """The kept (r, j) of one head."""
    return set(map(tuple, result.keep[batch, head].nonzero().tolist()))


def causal_blocks(num_blocks):
    return {(r, j) for r in range(num_blocks) for j in range(r + 1)}


def lines(num_blocks, key_blocks, diagonals):
    """Causal blocks in the key blocks, on the diagonals, or kept always."""
    return {(r, j) for r, j in causal_blocks(num_blocks) if j in key_blocks or r - j in diagonals or j in (0, r)}


def block_scores(*rows):
    """Scores whose pooled map has the given weights, normalised over each causal row."""
    levels = torch.tensor(rows, dtype=torch.float64).log()
    return levels.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


# Pooled map: 1 / .25 .75 / .25 .5 .25; all blocks except (2, 1) are kept always.
THREE_ROWS = block_scores([1, 1, 1], [1, 3, 1], [1, 2, 1])
