"""Blocks that the oracle always or never keeps, full blocks, growth with gamma and floor."""

import itertools
import math
from typing import Any

import pytest
import torch

from tests.oracle.by_hand import BLOCK, blocks, causal_blocks, decide, lines, planted_slash, random_inputs
from tests.oracle.flexprefill import reference_flexprefill


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


@pytest.mark.parametrize("seed", range(6))
def test_visible_and_full_blocks_pair_by_pair(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    kv_len = draw(20, 70)
    q_len = draw(1, kv_len)
    offset, window = draw(0, kv_len - q_len), draw(5, 60) if seed % 2 else None
    attention_mask = torch.rand(1, kv_len, generator=generator) < [0.7, 0.98, 1.0][seed % 3]
    result = decide(
        torch.randn(q_len, kv_len, generator=generator),
        gamma=1.0,
        q_offset=offset,
        window=window,
        attention_mask=attention_mask.int(),
    )
    for r in range(math.ceil(q_len / BLOCK)):
        for j in range(math.ceil(kv_len / BLOCK)):
            pairs = []
            for row in range(r * BLOCK, min(q_len, (r + 1) * BLOCK)):
                for column in range(j * BLOCK, min(kv_len, (j + 1) * BLOCK)):
                    position = offset + row
                    pairs.append(
                        bool(attention_mask[0, position] and attention_mask[0, column])
                        and column <= position
                        and (window is None or position - column < window)
                    )
            assert result.keep[0, 0, r, j].item() == any(pairs)
            assert result.full[0, 0, r, j].item() == all(pairs)


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


@pytest.mark.parametrize("selected_by", [{"tau": 0.0}, {"tau": 1.0}])
def test_larger_gamma_keeps_more(selected_by):
    query, key = random_inputs(4, 150, 150, num_heads=2)
    options: dict[str, Any] = {"block_size": BLOCK, "min_budget": BLOCK, **selected_by}
    kept = [reference_flexprefill(query, key, g, **options) for g in (0.2, 0.5, 0.8, 0.95, 1.0)]
    for fewer, more in itertools.pairwise(kept):
        assert (fewer.keep <= more.keep).all()
        assert (fewer.density <= more.density).all()
    assert (kept[0].density < kept[-2].density).all()
    assert torch.equal(kept[-1].keep[0, 0], torch.ones(10, 10).tril().bool())
    assert (kept[-1].density == 1).all()
    assert (kept[-1].vertical_margin == math.inf).all()
    assert (kept[-1].slash_margin == math.inf).all()
    assert (kept[-1].query_aware_margin == math.inf).all()


def test_default_floor_keeps_a_short_prompt_whole():
    query, key = random_inputs(5, 1000, 1000)
    assert reference_flexprefill(query, key).density.item() == 1.0
