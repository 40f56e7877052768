"""Counts of prefill tokens, density, and when they are logged."""

import pytest
import torch

from flexmask.integrations.serving.counters import Counters


def test_densities_are_weighed_by_rows():
    counters = Counters()
    assert counters.density is None
    assert "mean density none" in counters.report()
    counters.add_step(100, 40)
    counters.add_step(0, 2)
    counters.add_density(torch.tensor(0.5), 100)
    counters.add_density(torch.tensor(0.2), 200)
    assert counters.density == pytest.approx(0.3)
    assert counters.report() == "flexmask served 100 prefill tokens sparse in 1 steps, 42 dense; mean density 0.300"


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 2), (60.0, 0)])
def test_the_report_is_logged_now_and_then_in_steps_that_prefill(seconds, lines):
    counters, logged = Counters(), []
    counters.add_step(70, 0)
    counters.log()
    counters.log_to(lambda form, report: logged.append(form % report), seconds)
    counters.add_step(0, 0)
    assert logged == []
    counters.add_step(70, 0)
    counters.add_step(0, 10)
    assert len(logged) == lines
    counters.log()
    assert len(logged) == lines + 1
    assert "140 prefill tokens sparse in 2 steps, 10 dense" in logged[-1]
