"""The oracle's scores under scale and soft cap, blocks that it always keeps, and chunks."""

import math

import pytest
import torch

from tests.oracle.by_hand import NEVER, blocks, decide, lines, planted_slash


def test_scale_and_softcap_shape_the_scores():
    scores = torch.zeros(1, 32)
    scores[0, 0] = 2.0
    result = decide(scores, scale=3.0, softcap=5.0)
    weight = math.exp(5 * math.tanh(6 / 5))
    assert result.vertical[0, 0, 0].item() == pytest.approx((weight + 15) / (weight + 31))
    # The pooled score is capped after the mean: 3 * 2 / 16.
    weight = math.exp(5 * math.tanh(6 / 16 / 5))
    assert result.pooled[0, 0, 0, 0].item() == pytest.approx(weight / (weight + 1))


def test_always_keeps_first_visible_and_diagonal_blocks():
    # All attention lies three blocks back.
    forced = lines(6, {}, {})
    assert blocks(decide(planted_slash(96, 48), gamma=0.01)) == forced | lines(6, {2}, {3})
    window = decide(planted_slash(96, 24), gamma=0.01, window=40)
    # Row block r sees keys from 16r - 39: block r - 3 is the first from r = 3 on.
    for r in range(6):
        assert {(r, max(0, r - 3)), (r, r)} <= blocks(window)
    attention_mask = torch.ones(1, 96, dtype=torch.bool)
    attention_mask[0, :20] = False
    padded = decide(planted_slash(96, 24), gamma=0.01, attention_mask=attention_mask)
    assert all({(r, 1), (r, r)} <= blocks(padded) for r in range(1, 6))
    assert not any(j == 0 or r == 0 for r, j in blocks(padded))


def test_chunk_inside_a_block_lies_on_two_diagonals():
    # Rows at positions 40 to 71: query block 0 spans key blocks 2 and 3, query block 1 spans 3 and 4.
    scores = torch.full((32, 72), NEVER)
    for row in range(32):
        scores[row, 40 + row - 32] = 0.0
    result = decide(scores, gamma=0.5)
    assert result.slash[0, 0].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    # The last 16 rows attend to keys 24 to 39, half in block 1 and half in block 2: the lower wins the tie.
    forced = {(0, 0), (0, 2), (0, 3), (1, 0), (1, 3), (1, 4)}
    assert blocks(result) == forced | {(0, 1), (1, 1)} | {(0, 0), (0, 1), (1, 1), (1, 2)}
