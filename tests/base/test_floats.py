"""Large maps, and the plain steps on a device without float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexmask import select
from flexmask.base import blocks
from flexmask.base.scores import top_p, widest_float
from tests.cases import cases, published_cases
from tests.comparisons import compare_drawn


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
                raise TypeError(f"{func} gave float64")
        return out


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


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.9, 0.99])
def test_a_large_map_reaches_gamma(gamma, precision):
    """A running float32 sum stops growing before it has added a million small shares."""
    values = torch.rand(1, 1_000_000) * 1e-3
    kept = top_p(values, torch.ones_like(values).bool(), torch.tensor(gamma, dtype=precision))
    heaviest = values.double().sort(descending=True).values
    running = heaviest.cumsum(-1) - heaviest
    assert kept.sum().item() == pytest.approx(int((running < gamma * heaviest.sum()).sum()), abs=2)
    assert values[kept].min() >= values[~kept].max()
