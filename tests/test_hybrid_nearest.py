"""method="hybrid": the nearest blocks, pinned by hand.

Attention is even, over more key blocks than any threshold lets pass: a query block keeps its first block, the nearest of the
floor, and the nearest four if it holds a representative row.
"""

import contextlib
from typing import Any, NamedTuple

import pytest
import torch

from flexmask.block_masks import hybrid
from tests.cases import Case, Config, by_kernels
from tests.comparisons import kept_by_lists


class Problem(NamedTuple):
    """One call, and key blocks that it keeps, by batch row and query block."""

    kept: dict[tuple[int, int], set[int]]
    length: int = 1024
    q_len: int = 0  # 0: as long as the keys
    block_size: int = 128
    floor: int = 1  # in blocks
    window: int | None = None
    offset: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None  # right padding
    valid: slice | None = None  # tokens that are no padding


PROBLEMS = {
    "aligned": Problem({(0, 5): {0, 5}, (0, 6): {0, 6}, (0, 7): {0, 4, 5, 6, 7}}),
    "two blocks": Problem({(0, 5): {0, 5}, (0, 6): {0, 3, 4, 5, 6}, (0, 7): {0, 4, 5, 6, 7}}, length=1000),
    "no floor": Problem({(0, 6): {0, 6}, (0, 7): {0, 7}}, length=1000, floor=0),
    "two of a floor": Problem({(0, 12): {0, 11, 12}, (0, 15): {0, *range(8, 16)}}, length=256, block_size=16, floor=2),
    "largest floor": Problem({(0, 6): set(range(7)), (0, 7): set(range(8))}, floor=2**55),
    "ragged right padding": Problem(
        {
            (0, 6): {0, 6},
            (0, 7): {0, 4, 5, 6, 7},
            (1, 5): {0, 5},
            (1, 6): {0, 3, 4, 5, 6},
            (1, 7): set(),
            (2, 6): {0, 3, 4, 5, 6},
            (2, 7): {0, 4, 5, 6, 7},
        },
        length=256,
        block_size=32,
        lengths=(256, 224, 225),
    ),
    # the last 32 tokens stand in 64 positions
    "holes": Problem(
        {(0, 13): {0, 13}, (0, 14): {0, 11, 12, 13, 14}, (0, 15): {0, 12, 13, 14, 15}},
        length=512,
        block_size=32,
        valid=slice(None, None, 2),
    ),
    "window": Problem({(0, 23): {13, 23}, (0, 24): {14, 21, 22, 23, 24}}, length=400, block_size=16, window=150),
    "window within reach": Problem({(0, 24): set(range(14, 25))}, length=400, block_size=16, window=150, floor=4),
    "chunk inside blocks": Problem({(0, 0): {0, 5, 6}, (0, 1): {0, 3, 4, 5, 6, 7}}, length=1000, q_len=256),
    "offset of each prompt": Problem(
        {
            (0, 0): {0, 6, 7},
            (0, 1): {0, 4, 5, 6, 7, 8},
            (0, 2): {0, 5, 6, 7, 8},
            (1, 0): {0, 7, 8},
            (1, 1): {0, 5, 6, 7, 8, 9},
            (1, 2): {0, 6, 7, 8, 9},
        },
        length=300,
        q_len=75,
        block_size=32,
        offset=(200, 225),
    ),
}


def case_of(problem: Problem) -> Case:
    """Two heads of one key head; all scores are 0."""
    batch = len(problem.lengths or problem.offset or (0,))
    query, key = torch.zeros(batch, 2, problem.q_len or problem.length, 16), torch.zeros(batch, 1, problem.length, 16)
    mask = None
    if problem.lengths is not None:
        mask = torch.arange(problem.length) < torch.tensor(problem.lengths)[:, None]
    if problem.valid is not None:
        mask = torch.zeros(batch, problem.length, dtype=torch.bool)
        mask[:, problem.valid] = True
    size = problem.block_size
    config = Config(0.01, block_size=size, min_budget=problem.floor * size, min_coverage=0.0, method="hybrid")
    offset = None if problem.offset is None else torch.tensor(problem.offset)
    return Case(query, key, config, {} if problem.window is None else {"window": problem.window}, mask, offset)


@pytest.fixture(autouse=True)
def _four_times(monkeypatch):
    monkeypatch.setattr(hybrid, "NEAREST", 4)


def found_by(by: str, case: Case) -> Any:
    if by == "oracle":
        return case.reference().keep
    if by == "kernels":
        pytest.importorskip("triton", minversion="3.6", reason="older interpreters do not run with today's NumPy")
        if torch.cuda.is_available():
            pytest.skip("where there is a GPU, kernels run there")
    with by_kernels() if by == "kernels" else contextlib.nullcontext():
        partial, full = kept_by_lists(case.search())
    return partial | full


# the interpreter takes over a second each
LIKE_OTHERS = {"aligned", "no floor", "largest floor", "window within reach"}
RUNS = [
    pytest.param(name, by, marks=pytest.mark.slow if by == "kernels" and name in LIKE_OTHERS else [])
    for name in PROBLEMS
    for by in ("oracle", "plain", "kernels")
]


@pytest.mark.parametrize(("name", "by"), RUNS)
def test_keeps_the_nearest(name, by):
    problem = PROBLEMS[name]
    keep = found_by(by, case_of(problem))
    found = {place: [set(row.nonzero().flatten().tolist()) for row in keep[place[0], :, place[1]]] for place in problem.kept}
    assert found == {place: [blocks, blocks] for place, blocks in problem.kept.items()}
