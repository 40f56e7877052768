"""Blocks that the oracle always or never keeps, full blocks, growth with gamma and floor."""

import torch

from tests.oracle.by_hand import blocks, causal_blocks, decide, lines, planted_slash


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


def test_full_blocks_with_window():
    result = decide(torch.zeros(64, 64), gamma=1.0, window=32)
    assert blocks(result) == {(r, j) for r, j in causal_blocks(4) if r - j <= 2}
    full = result.full[0, 0].nonzero().tolist()
    assert full == [[1, 0], [2, 1], [3, 2]]


def test_full_blocks_with_a_hole():
    attention_mask = torch.ones(1, 64, dtype=torch.bool)
    attention_mask[0, 20] = False
    result = decide(torch.zeros(64, 64), gamma=1.0, attention_mask=attention_mask)
    # With token 20 missing, neither query block 1 nor key block 1 has a full block.
    assert blocks(result) == causal_blocks(4)
    assert result.full[0, 0].nonzero().tolist() == [[2, 0], [3, 0], [3, 2]]
