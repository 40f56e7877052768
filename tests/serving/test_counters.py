"""Counts of prefill tokens, density, and when they are logged."""

import dataclasses
import logging
import math

import pytest
import torch

from flexmask.integrations.serving.counters import IN_EVERY_STEP, IN_SOME_STEPS, Counters
from flexmask.stats import dense_stats


def stats(density, **held):
    """Of a sparse call with one head per number; what is not in `held` was not computed."""
    heads = torch.tensor([density]) if isinstance(density, list) else torch.tensor([[density]])
    unknown = torch.full_like(heads, math.nan)
    found = {"coverage": unknown, "least_row_coverage": unknown, **{name: torch.tensor([each]) for name, each in held.items()}}
    none = torch.zeros_like(heads, dtype=torch.bool)
    return dataclasses.replace(dense_stats(heads[..., None, None]), density=heads, dense_heads=none, dense=False, **found)


def test_a_density_is_the_kept_share_of_all_pairs_of_queries_and_keys():
    counters = Counters()
    assert counters.density is None
    assert "mean density none" in counters.report()
    counters.add_step(100, 40)
    counters.add_step(0, 2)
    # 100 rows see 5,050 keys in all, the 100 after them 15,050
    counters.add_call(0, stats([0.4, 0.6]), 100, 100)
    counters.add_call(0, stats([0.1, 0.3]), 100, 200)
    assert counters.density == pytest.approx((0.5 * 5050 + 0.2 * 15050) / 20100)
    assert counters.report() == "flexmask served 100 prefill tokens sparse in 1 steps, 42 dense; mean density 27.5%"


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
    counters.add_call(2, stats([0.3, 0.3], coverage=[0.1, 0.9], least_row_coverage=[0.26, 0.11]), 70, 70)
    counters.add_call(3, stats([0.3, 0.3], coverage=[0.2, 0.9]), 70, 70)
    # a request that chose its gamma
    counters.add_call(4, stats(0.3, coverage=[0.0]), 70, 70, heads=False)
    for _ in range(2):
        counters.log()
    assert caplog.messages == [
        "flexmask: heads that keep less than 25% of some rows' attention: layer 2 head 1 11%, layer 3 head 0 20%"
    ]


def test_heads_are_looked_at_in_the_first_sparse_step_after_a_log():
    counters, told = Counters(), []
    counters.log_to(logging.getLogger("serving"), 60.0)
    for sparse, logs in ((0, 0), (70, 0), (0, 0), (70, 0), (70, 1), (0, 0), (70, 0), (70, 0)):
        counters.add_step(sparse, 70 - sparse)
        told.append((sparse, counters.statistics))
        if logs:
            counters.log()
    assert [names == IN_SOME_STEPS for sparse, names in told if sparse] == [True, False, False, True, False]
    # a look that is over is not added to
    assert counters.statistics == IN_EVERY_STEP
    counters.add_call(0, stats(0.3, coverage=[0.0]), 70, 70)
    assert counters.low_heads() is None
