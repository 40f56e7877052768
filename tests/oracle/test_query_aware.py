"""The oracle's query-aware heads: the pooled map and its top-p blocks."""

import torch

from tests.oracle.by_hand import BLOCK, THREE_ROWS, block_scores, blocks, causal_blocks, decide, lines


def test_pooled_map_is_block_softmax():
    result = decide(THREE_ROWS, tau=1.0)
    expected = torch.tensor([[1, 0, 0], [0.25, 0.75, 0], [0.25, 0.5, 0.25]])
    assert torch.allclose(result.pooled[0, 0], expected.double(), rtol=0, atol=1e-12)
    assert result.is_query_aware.item()


def test_flatten_shares_one_budget_and_per_query_does_not():
    forced = lines(3, {}, {})
    # Of a sum of 3, 1 + .75 reach 1.35; in row 2 alone, the .5 reaches .45.
    assert blocks(decide(THREE_ROWS, gamma=0.45, tau=1.0)) == forced
    per_query = decide(THREE_ROWS, gamma=0.45, tau=1.0, query_aware="per_query")
    assert blocks(per_query) == forced | {(2, 1)}
    # The block that crosses the threshold is kept: 1.75 < 1.8.
    assert blocks(decide(THREE_ROWS, gamma=0.6, tau=1.0)) == forced | {(2, 1)}


def test_equal_pooled_values_take_the_lower_flat_index():
    # Row r holds 1 / (r + 1) in each block: 1, 2 halves, 3 thirds, then 2 of row 3's quarters.
    result = decide(torch.zeros(80, 80), gamma=0.68, tau=1.0)
    assert blocks(result) == lines(5, {}, {}) | {(2, 1), (3, 1)}
    assert result.query_aware_margin.item() < 1e-9


def test_row_budget_keeps_the_heaviest():
    scores = block_scores(*[[1, 2, 3, 4, 5]] * 5)
    result = decide(scores, gamma=1.0, tau=1.0, max_budget=2 * BLOCK)
    heaviest = {(r, j) for r, j in causal_blocks(5) if j >= r - 1}
    assert blocks(result) == heaviest | lines(5, {}, {})
    assert result.num_vertical_blocks.item() == 0


def test_query_aware_head_gets_the_floor():
    # The last rows favour key 40, in block 2; the pooled map is almost flat.
    scores = torch.zeros(96, 96)
    scores[80:, 40] = 2.0
    result = decide(scores, gamma=0.05, tau=1.0, min_budget=BLOCK)
    assert result.is_query_aware.item()
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (1, 1)
    assert result.vertical[0, 0].argmax().item() == 2
    diagonal = result.slash[0, 0].argmax().item()
    assert blocks(result) == lines(6, {2}, {diagonal})
