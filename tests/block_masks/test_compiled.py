"""Methods compiled as on accelerators: one compilation for all lengths and values of a float."""

import functools
import types

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flexmask import compilation, run_method
from flexmask._torch import is_traced
from tests.block_masks.gallery import MASKS, SPARSE
from tests.cases import structured_inputs
from tests.compile_support import fresh_compiler as fresh_compiler

LENGTHS = (300, 333, 257)
QUERY, KEY = structured_inputs(torch.Generator().manual_seed(1), 1, 2, 1, 333, 333, 32, sharpness=2.0)


@pytest.fixture
def counters(monkeypatch):
    """Compile on this CPU too, and count the graphs of each function and variant."""
    counted = {}

    @functools.cache
    def count(function, numbers, variant):
        own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        counted[function.__name__, numbers, variant] = counter = CompileCounterWithBackend("eager")
        return torch.compile(own, fullgraph=True, backend=counter)

    monkeypatch.setattr(compilation, "_compile", count)
    monkeypatch.setattr(compilation, "runs_plain", lambda query: is_traced())
    return counted


def graphs(counters) -> dict[str, int]:
    """The number of graphs by method."""
    total: dict[str, int] = {}
    for (_, _, (name, *_)), counter in counters.items():
        total[name] = total.get(name, 0) + counter.frame_count
    return total


@pytest.mark.parametrize("name", ["xattention", "vertical_slash", "hybrid"])
def test_lengths_share_a_compilation(name, counters, monkeypatch):
    for length in LENGTHS:
        # a view would bring its whole tensor's shape into the guards
        inputs = [x[:, :, :length].clone(memory_format=torch.contiguous_format) for x in (QUERY, KEY)]
        got = MASKS[name](*inputs, block_size=16, **SPARSE[name]).to_dense()
        with monkeypatch.context() as plain:
            plain.setattr(compilation, "runs_plain", lambda query: True)
            assert torch.equal(got, MASKS[name](*inputs, block_size=16, **SPARSE[name]).to_dense())
    assert graphs(counters) == {name: 1}


def test_values_of_a_float_share_a_compilation_and_constants_do_not(counters):
    for threshold in (0.3, 0.5, 1, 0.9):
        MASKS["xattention"](QUERY, KEY, block_size=16, threshold=threshold)
    assert graphs(counters) == {"xattention": 1}
    MASKS["xattention"](QUERY, KEY, block_size=16, stride=4)
    assert graphs(counters) == {"xattention": 2}


def test_slices_share_a_compilation(counters, monkeypatch):
    monkeypatch.setattr(run_method, "MOST_NUMBERS", 16 * 333 * 4)
    MASKS["oracle"](QUERY, KEY, block_size=16)
    # the last slice is shorter than a block; then the lists of their maps
    assert graphs(counters) == {"oracle": 2, "map": 1}
