"""The oracle's Sparse Pattern Search: distance, tau, representative rows."""

import math

import pytest
import torch

from tests.oracle.by_hand import BLOCK, NEVER, decide, planted_slash


@pytest.mark.parametrize("kv_len", [64, 20 * BLOCK + 1])
def test_uniform_attention_has_no_distance(kv_len):
    result = decide(torch.zeros(1, kv_len), tau=0.01)
    assert result.js_distance.item() < 1e-7
    assert result.is_query_aware.item()


def test_one_token_tail_weighs_as_one_token():
    # The last block is one key; weighing it as a whole block would give a distance of 0.14.
    length = 20 * BLOCK + 1
    result = decide(torch.zeros(length, length))
    assert 0.04 < result.js_distance.item() < 0.05


def test_distance_of_two_known_distributions():
    # One row, scores 40 and -40 in block 0: they cancel in the mean, so the estimate is (1/2, 1/2).
    scores = torch.zeros(1, 32)
    scores[0, 0], scores[0, 1] = 40.0, -40.0
    divergence = (math.log(1 / 0.75) + 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2)) / 2
    result = decide(scores, tau=0.5)
    assert result.js_distance.item() == pytest.approx(math.sqrt(divergence), rel=1e-9)
    assert result.is_query_aware.item()
    expected = (0.5 - math.sqrt(divergence)) / 0.5
    assert result.pattern_margin.item() == pytest.approx(expected)
    assert not decide(scores, tau=0.4).is_query_aware.item()
    assert decide(scores, tau=0.0).pattern_margin.item() == math.inf


def test_distance_is_at_most_root_log_two():
    # Block 0 holds all attention, though its mean score is far below that of block 1.
    scores = torch.full((1, 32), NEVER)
    scores[0, 0], scores[0, BLOCK:] = 0.0, -50.0
    distance = decide(scores, tau=1.0).js_distance.item()
    assert distance == pytest.approx(math.sqrt(math.log(2)))


@pytest.mark.parametrize("name", ["pattern_queries", "index_queries"])
def test_middle_rows_by_ordinal(name):
    # Every row attends to itself only; of 41 rows the middle 16 are 12 to 27, the last 16 are 25 to 40.
    result = decide(planted_slash(41, 0), **{name: "middle"})
    expected = [4 / 16, 12 / 16, 0.0] if name == "index_queries" else [0.0, 7 / 16, 9 / 16]
    assert result.vertical[0, 0].tolist() == expected


def test_pattern_rows_decide_the_distance_only():
    scores = torch.zeros(96, 96)
    scores[80:, 3], scores[80:, 4] = 12.0, -12.0
    last, middle = decide(scores, tau=0.3), decide(scores, tau=0.3, pattern_queries="middle")
    assert not last.is_query_aware.item()
    assert middle.is_query_aware.item()
    assert torch.equal(last.vertical, middle.vertical)


def test_representative_rows_are_valid_rows_adjacent_or_not():
    attention_mask = torch.ones(1, 64, dtype=torch.int64)
    attention_mask[0, 40:56] = 0
    result = decide(planted_slash(64, 0), attention_mask=attention_mask)
    assert result.vertical[0, 0].tolist() == [0.0, 0.0, 0.5, 0.5]
