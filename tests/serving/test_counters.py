"""Counts of prefill tokens, density, and when they are logged."""

import dataclasses
import logging
import math

import pytest
import torch

from flexmask.attend import AttentionResult
from flexmask.base.inputs import AttentionInputs
from flexmask.base.visibility import block_visibility, num_visible_blocks
from flexmask.integrations.serving.counters import SAMPLED_STATISTICS, Counters
from flexmask.stats import dense_stats
from tests.serving.layers import sparse_role

ROLES = [sparse_role(number=number, block_size=48) for number in range(5)]


def sparse(*kept):
    """A call with one query block and one head per pair of numbers, of partial and of full blocks."""
    counts = torch.tensor(kept, dtype=torch.int32).T[:, None, :, None]
    return AttentionResult(torch.empty(()), counts=tuple(counts))


def looked_at(**held):
    """A sparse call of two heads with statistics; those that are not in `held` are NaN, as if not computed."""
    heads = torch.tensor([[0.3, 0.3]])
    unknown, none = torch.full_like(heads, math.nan), torch.zeros_like(heads, dtype=torch.bool)
    found = {"coverage": unknown, "min_row_coverage": unknown, **{name: torch.tensor([each]) for name, each in held.items()}}
    stats = dataclasses.replace(dense_stats(heads[..., None, None]), density=heads, dense_heads=none, dense=False, **found)
    return sparse((0, 1), (0, 1))._replace(stats=stats)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40, 1000])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (16, 16), (63, 63), (1, 100), (50, 131), (32, 128)])
def test_visible_blocks_are_those_of_the_map(q_len, kv_len, window):
    query, key = (torch.empty(1, 1, length, 1) for length in (q_len, kv_len))
    tokens = AttentionInputs(query, key, None, 1.0, window=window).with_offset().tokens()
    assert num_visible_blocks(q_len, kv_len, 16, window) == int(block_visibility(tokens, 16, window).visible.sum())


def test_a_density_is_the_kept_share_of_all_pairs_of_queries_and_keys():
    counters = Counters()
    assert counters.density is None
    assert "mean density none" in counters.report()
    counters.add_step(100, 40)
    counters.add_step(0, 2)
    # 100 rows see 5,050 keys in 6 blocks, the 100 after them 15,050 in 14, and 50 that run dense 1,275
    counters.add_call(ROLES[0], sparse((1, 0), (0, 2)), 100, 100)
    counters.add_call(ROLES[0], sparse((1, 2), (2, 2)), 100, 200)
    counters.add_call(ROLES[0], AttentionResult(torch.empty(())), 50, 50)
    expected = (3 / 12 * 5050 + 7 / 28 * 15050 + 1275) / 21375
    assert counters.density == counters.density == pytest.approx(expected)
    assert counters.report() == "flexmask served 100 prefill tokens sparse in 1 steps, 42 dense; mean density 29.5%"
    counters.reset()
    assert counters.density is None


def test_counts_of_layers_are_added_together_and_do_not_pile_up():
    counters, waiting = Counters(), []
    for rows in [100] * 100 + list(range(50, 200)):
        counters.add_call(ROLES[0], sparse((1, 0), (0, 2)), rows, rows)
        waiting.append(sum(map(len, counters._counts.values())))
    assert max(waiting) < 64 and waiting[:31] == list(range(2, 64, 2)) and waiting[31] == 0


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 2), (60.0, 0)])
def test_the_report_is_logged_now_and_then_in_steps_that_prefill(seconds, lines, caplog):
    caplog.set_level("INFO")
    counters = Counters()
    counters.add_step(70, 0)
    counters.log()
    counters.log_to(logging.getLogger("serving"), seconds)
    counters.add_step(0, 0)
    assert caplog.messages == []
    counters.add_step(70, 0)
    counters.add_step(0, 10)
    assert len(caplog.messages) == lines
    counters.log()
    assert len(caplog.messages) == lines + 1
    assert "140 prefill tokens sparse in 2 steps, 10 dense" in caplog.messages[-1]


def test_heads_that_keep_little_are_named_once_for_all_layers(caplog):
    counters = Counters()
    counters.log_to(logging.getLogger("serving"), 60.0)
    counters.add_step(70, 0)
    counters.add_call(ROLES[2], looked_at(coverage=[0.1, 0.9], min_row_coverage=[0.26, 0.11]), 70, 70)
    counters.add_call(ROLES[3], looked_at(coverage=[0.2, 0.9]), 70, 70)
    # a request that chose its gamma
    counters.add_call(ROLES[4], looked_at(coverage=[0.0, 0.0]), 70, 70, names_heads=False)
    for _ in range(2):
        counters.log()
    assert caplog.messages == [
        "flexmask: heads that keep less than 25% of some rows' attention: layer 2 head 1 11%, layer 3 head 0 20%"
    ]
    # once heads are named, no step samples any
    counters.add_step(70, 0)
    assert counters.statistics == ()


def test_heads_are_looked_at_in_the_first_sparse_step_after_a_log():
    counters, told = Counters(), []
    counters.log_to(logging.getLogger("serving"), 60.0)
    for sparse, logs in ((0, 0), (70, 0), (0, 0), (70, 0), (70, 1), (0, 0), (70, 0), (70, 0)):
        counters.add_step(sparse, 70 - sparse)
        told.append((sparse, counters.statistics))
        if logs:
            counters.log()
    assert [names == SAMPLED_STATISTICS for sparse, names in told if sparse] == [True, False, False, True, False]
    # a look that is over is not added to
    assert counters.statistics == ()
    counters.add_call(ROLES[0], looked_at(coverage=[0.0, 0.0]), 70, 70)
    assert counters.low_heads() is None
