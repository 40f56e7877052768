"""The oracle under method="published": counts, lines and blocks."""

import math
from typing import Any

import pytest
import torch

from tests.oracle.by_hand import BLOCK, NEVER, THREE_ROWS, blocks, causal_blocks, decide, lines, planted_slash


def test_published_count_includes_equal_sums():
    # The last rows spread evenly over 256 keys, so n tokens hold exactly n / 256: all 16 keys of
    # block 1 and 8 in each of the others but the last.
    scores = torch.full((512, 512), NEVER)
    scores[:, :496].unflatten(1, (31, BLOCK))[:, :, :8] = 0.0
    scores[:, BLOCK : 2 * BLOCK] = 0.0
    options: dict[str, Any] = {"method": "published", "tau": 1.0}
    # 127 tokens hold 127/256; one more makes 128, which is two blocks.
    for tokens, count in ((126.75, 1), (127, 2), (127.25, 2)):
        result = decide(scores, gamma=tokens / 256, **options)
        assert result.num_vertical_blocks.item() == count
        assert result.vertical_margin.item() == pytest.approx(abs(tokens - 127) / tokens)
    # The last block's share underflows, so the head is not query-aware even at tau = 1.
    assert math.isnan(result.js_distance.item())
    assert not result.is_query_aware.item()
    assert result.pattern_margin.item() == math.inf


def test_published_underflow_is_that_of_float32():
    scores = torch.zeros(32, 32)
    scores[16:, :16] = -90.0
    options: dict[str, Any] = {"method": "published", "tau": 1.0}
    assert decide(scores, **options).is_query_aware.item()
    scores[16:, :16] = -150.0
    assert not decide(scores, **options).is_query_aware.item()
    scores[16:, :16] = -104.0
    assert decide(scores, **options).pattern_margin.item() == 0.0


def test_published_slash_block_stands_for_one_diagonal():
    # Offset 21: offset block 1 only, though the slash crosses diagonals 1 and 2.
    scores = planted_slash(96, 21)
    options: dict[str, Any] = {"method": "published", "gamma": 0.9}
    result = decide(scores, min_budget=2 * BLOCK, **options)
    assert result.slash[0, 0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    # Block 0 takes a place; rows 80 to 95 attend to keys 59 to 74, mostly block 4.
    kept = {(r, j) for r, j in causal_blocks(6) if j in (0, 4) or r - j in (0, 1)}
    assert blocks(result) == kept
    # One place, and it goes to block 0.
    result = decide(scores, **options)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (1, 1)
    assert blocks(result) == {(r, j) for r, j in causal_blocks(6) if j == 0 or j == r}


def test_published_query_aware_leaves_the_crossing_block_out():
    # The threshold is .6 * 3 = 1.8: 1 + .75 stay within, the .5 crosses. Key block 0 and the diagonal need no floor.
    options: dict[str, Any] = {"method": "published", "tau": 1.0}
    result = decide(THREE_ROWS, gamma=0.6, **options)
    assert blocks(result) == lines(3, {0}, {0})
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (0, 0)
    expected = min(0.05 / 1.8, 0.45 / 1.8, 0.25 / 0.75)
    assert result.query_aware_margin.item() == pytest.approx(expected)
    result = decide(THREE_ROWS, gamma=0.6, min_budget=BLOCK, **options)
    assert blocks(result) == lines(3, {0}, {0})


def test_published_counts_are_clamped():
    scores = torch.zeros(512, 512)
    options: dict[str, Any] = {"method": "published", "gamma": 0.9}
    # Between 384 and 511 of 512 even tokens hold 0.9: 4 blocks whatever their size.
    assert decide(scores, **options).num_vertical_blocks.item() == 4
    capped = decide(scores, max_budget=2 * BLOCK + 1, **options)
    assert capped.num_vertical_blocks.item() == 3
    raised = decide(scores, min_budget=6 * BLOCK, **options)
    assert (raised.num_vertical_blocks.item(), raised.num_slash_blocks.item()) == (6, 6)
    whole = decide(scores, min_budget=10_000, **options)
    assert whole.num_slash_blocks.item() == 32
    assert whole.density.item() == 1.0
    assert whole.vertical_margin.item() == math.inf
