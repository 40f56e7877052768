"""The oracle on calls small enough to work out by hand; everything else compares it with the product."""

from typing import Any

import pytest
import torch

from tests.oracle.reference import reference

BLOCK = 16
NEVER = -1000.0  # next to a score of 0 the attention is exactly 0, in float64


def decide(scores, **options):
    """The oracle on given scores, (q_len, kv_len), for one head."""
    key = torch.eye(scores.shape[1], dtype=torch.float64)
    defaults: dict[str, Any] = {"gamma": 0.9, "tau": 0.0, "block_size": BLOCK, "min_budget": 0, "scale": 1.0}
    return reference(scores.double()[None, None], key[None, None], **{**defaults, **options})


def planted_slash(length, offset):
    """All attention at the key `offset` before the row; rows before `offset` attend to all keys alike."""
    scores = torch.full((length, length), NEVER)
    for row in range(offset, length):
        scores[row, row - offset] = 0.0
    return scores


def blocks(result):
    """The kept (r, j)."""
    return set(map(tuple, result.keep[0, 0].nonzero().tolist()))


def lines(num_blocks, key_blocks, diagonals):
    """Causal blocks in the key blocks, on the diagonals, or kept always."""
    causal = {(r, j) for r in range(num_blocks) for j in range(r + 1)}
    return {(r, j) for r, j in causal if j in key_blocks or r - j in diagonals or j in (0, r)}


@pytest.mark.parametrize("shift", [0, 5])
def test_a_slash_is_split_over_two_diagonals(shift):
    result = decide(planted_slash(64, BLOCK + shift), gamma=0.95)
    assert result.slash[0, 0].tolist() == pytest.approx([0.0, 1 - shift / BLOCK, shift / BLOCK, 0.0], abs=1e-12)
    # rows 48 to 63 see keys 32 - shift to 47 - shift
    assert result.vertical[0, 0].tolist() == pytest.approx([0.0, shift / BLOCK, 1 - shift / BLOCK, 0.0], abs=1e-12)
    assert blocks(result) == lines(4, {2} if shift == 0 else {1, 2}, {1} if shift == 0 else {1, 2})


def test_a_query_aware_head_takes_the_top_p_of_its_pooled_map():
    # pooled map: 1 / .25 .75 / .25 .5 .25; all blocks except (2, 1) are kept always
    weights = torch.tensor([[1, 1, 1], [1, 3, 1], [1, 2, 1]], dtype=torch.float64).log()
    scores = weights.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    always = lines(3, {}, {})
    # of a sum of 3, 1 + .75 reach 1.35; in row 2 alone, the .5 reaches .45; the block that crosses 1.8 is kept
    assert blocks(decide(scores, gamma=0.45, tau=1.0)) == always
    assert blocks(decide(scores, gamma=0.45, tau=1.0, query_aware="per_query")) == always | {(2, 1)}
    assert blocks(decide(scores, gamma=0.6, tau=1.0)) == always | {(2, 1)}
    # the published code leaves it out
    assert blocks(decide(scores, gamma=0.6, tau=1.0, method="published")) == always


def test_a_published_slash_block_stands_for_one_diagonal():
    # offset 21: offset block 1 only, though the slash crosses diagonals 1 and 2
    result = decide(planted_slash(96, 21), min_budget=2 * BLOCK, method="published")
    assert result.slash[0, 0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    # block 0 takes a place; rows 80 to 95 attend to keys 59 to 74, mostly block 4
    assert blocks(result) == {(r, j) for r in range(6) for j in range(r + 1) if j in (0, 4) or r - j in (0, 1)}
