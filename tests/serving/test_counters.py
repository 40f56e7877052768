"""Counts of prefill tokens, density, and when they are logged."""

import logging

import pytest
import torch

from flexmask.integrations.serving.counters import Counters


def test_a_density_is_the_kept_share_of_all_pairs_of_queries_and_keys():
    counters = Counters()
    assert counters.density is None
    assert "mean density none" in counters.report()
    counters.add_step(100, 40)
    counters.add_step(0, 2)
    # 100 rows see 5,050 keys in all, the 100 after them 15,050
    counters.add_density(torch.tensor(0.5), 100, 100)
    counters.add_density(torch.tensor(0.2), 100, 200)
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


def test_a_reason_is_logged_once(caplog):
    counters = Counters()
    counters.warn_once("one")
    assert caplog.messages == []
    counters.log_to(logging.getLogger("serving"), 60.0)
    for reason in ("one", "two", "one"):
        counters.warn_once(reason)
    assert caplog.messages == [f"flexmask: attention runs stock: {reason}" for reason in ("one", "two")]
