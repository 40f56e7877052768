"""Running sums, and the plain steps on a device without float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexmask import select
from flexmask.base import blocks
from flexmask.base.scores import running_sums, top_p, widest_float
from tests.cases import cases, published_cases
from tests.comparisons import compare_drawn


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


def test_float64_is_not_asked_for_where_there_is_none():
    found = {name: widest_float(torch.device(name)) for name in ("cpu", "cuda", "mps")}
    assert found == {"cpu": torch.float64, "cuda": torch.float64, "mps": torch.float32}


def test_selection_needs_no_float64(monkeypatch):
    for module in (select, blocks):
        monkeypatch.setattr(module, "widest_float", lambda device: torch.float32)

    def search(case):
        with NoFloat64():
            return case.search()

    compare_drawn(cases() | published_cases() | cases(method="hybrid", row_stride=16), 40, search)


@pytest.mark.parametrize("gamma", [0.9, 0.99])
def test_a_large_map_reaches_gamma(gamma):
    """A running float32 sum stops growing before it has added a million small shares."""
    count = 1_000_000
    values, candidates = torch.full((1, count), 1 / count), torch.ones(1, count).bool()
    kept = top_p(values, candidates, torch.tensor(gamma, dtype=torch.float64))
    assert kept.sum().item() == pytest.approx(gamma * count, abs=1)
    assert kept[0, : int(gamma * count) - 1].all()
