"""Running sums, and the plain steps on a device without float64."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from flexmask import select
from flexmask.base import blocks
from flexmask.base.floats import running_sums, widest_float
from tests.cases import cases, published_cases
from tests.comparisons import Drawn, Tally, assert_as_the_oracle


class NoFloat64(TorchDispatchMode):
    """A device without float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
                raise TypeError(f"{func} gave float64")
        return out


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_sums_of_many_small_values_reach_their_total(precision):
    values = torch.rand(2, 2_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    sums = running_sums(values, precision)
    assert sums.dtype == precision
    exact = values.double().cumsum(-1)
    torch.testing.assert_close(sums.double(), exact, rtol=1e-7 if precision == torch.float32 else 0, atol=1e-8)


@pytest.mark.parametrize("has_float64", [True, False])
def test_float64_is_not_asked_for_where_there_is_none(monkeypatch, has_float64):
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=has_float64))
    widest = torch.float64 if has_float64 else torch.float32
    expected = {"cpu": torch.float64, "cuda": torch.float64, "mps": torch.float32, "xpu": widest}
    assert {name: widest_float(torch.device(name)) for name in expected} == expected


def test_selection_needs_no_float64(monkeypatch):
    tally, drawn = Tally(), Drawn()
    for module in (select, blocks):
        monkeypatch.setattr(module, "widest_float", lambda device: torch.float32)

    @settings(max_examples=40)
    @given(cases() | published_cases() | cases(method="hybrid", row_stride=16))
    def run(case):
        with NoFloat64():
            result = case.search()
        expected = case.reference()
        assert_as_the_oracle(result, expected, tally, underflow=case.config.method == "published")
        drawn.add(expected)

    run()
    tally.check()
