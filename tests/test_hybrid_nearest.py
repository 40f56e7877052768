"""selection="hybrid": query blocks that hold representative rows keep their nearest blocks, pinned by hand.

Attention is all but even, over more key blocks than any threshold lets pass. So a query block keeps its first block, its own,
the heaviest key block (half of a floor of two blocks), and, if it holds a representative row, the nearest four diagonals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from flexmask import FlexPrefillConfig
from flexmask.base.inputs import AttentionInputs
from flexmask.plain.search import search as plain_search
from flexmask.reference.flexprefill import reference_flexprefill

GAMMA = 0.01


class Problem(NamedTuple):
    """One call, and key blocks that it keeps, by batch row and query block."""

    kept: dict[tuple[int, int], set[int]]
    length: int = 1024
    q_len: int = 0  # 0: as long as the keys
    block_size: int = 128
    floor: int = 2  # in blocks
    heavy_key: int = 0
    window: int | None = None
    offset: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None  # right padding, told by an attention mask
    deciding: tuple[int, ...] | None = None  # right padding of which nothing tells
    valid: slice | None = None  # tokens that are no padding
    rows: str = "last"


PROBLEMS = {
    "aligned": Problem({(0, 5): {0, 5}, (0, 6): {0, 6}, (0, 7): {0, 4, 5, 6, 7}}),
    "two blocks": Problem({(0, 5): {0, 5}, (0, 6): {0, 3, 4, 5, 6}, (0, 7): {0, 4, 5, 6, 7}}, length=1000),
    "no floor": Problem({(0, 6): {0, 6}, (0, 7): {0, 7}}, length=1000, floor=0),
    "every visible block": Problem({(0, 7): set(range(8))}, floor=5),
    "largest floor": Problem({(0, 6): set(range(7)), (0, 7): set(range(8))}, floor=2**55),
    "right padding": Problem(
        {(0, 6): {0, 6}, (0, 7): {0, 4, 5, 6, 7}, (1, 5): {0, 5}, (1, 6): {0, 3, 4, 5, 6}, (1, 7): set()},
        length=256,
        block_size=32,
        lengths=(256, 224),
    ),
    "ragged right padding": Problem(
        {(0, 6): {0, 6}, (0, 7): {0, 4, 5, 6, 7}, (1, 6): {0, 3, 4, 5, 6}, (1, 7): {0, 4, 5, 6, 7}},
        length=256,
        block_size=32,
        lengths=(256, 225),
    ),
    "rows that do not decide": Problem(
        {(0, 6): {0, 6}, (0, 7): {0, 4, 5, 6, 7}, (1, 5): {0, 5}, (1, 6): {0, 3, 4, 5, 6}, (1, 7): {0, 7}},
        length=256,
        block_size=32,
        deciding=(256, 224),
    ),
    # blocks of no power of two: past the first prompt's rows stand those of the second
    "padded row list": Problem(
        {(0, 5): {0, 5}, (0, 6): {0, 3, 4, 5, 6}, (0, 7): {0, 7}, (1, 6): {0, 6}, (1, 8): {0, 8}, (1, 9): {0, 6, 7, 8, 9}},
        length=480,
        block_size=48,
        deciding=(336, 480),
    ),
    # the last 32 tokens stand in 64 positions
    "holes": Problem(
        {(0, 13): {0, 13}, (0, 14): {0, 11, 12, 13, 14}, (0, 15): {0, 12, 13, 14, 15}},
        length=512,
        block_size=32,
        valid=slice(None, None, 2),
    ),
    "window": Problem(
        {(0, 23): {13, 20, 23}, (0, 24): {14, 20, 21, 22, 23, 24}}, length=400, block_size=16, window=150, heavy_key=325
    ),
    "window within reach": Problem({(0, 24): set(range(14, 25))}, length=400, block_size=16, window=150, floor=8, heavy_key=325),
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
    "middle": Problem(
        {(0, 5): {0, 5}, (0, 6): {0, 3, 4, 5, 6}, (0, 7): {0, 4, 5, 6, 7}, (0, 13): {0, 13}},
        length=448,
        block_size=32,
        rows="middle",
    ),
}


def problem_inputs(problem: Problem) -> tuple[AttentionInputs, FlexPrefillConfig]:
    """Two heads of one key head; all scores are 0 but those of the heavy key, which are a little more."""
    batch = len(problem.lengths or problem.deciding or problem.offset or (0,))
    query = torch.zeros(batch, 2, problem.q_len or problem.length, 16)
    key = torch.zeros(batch, 1, problem.length, 16)
    query[..., 0] = key[:, :, problem.heavy_key, 0] = 1.0
    mask = None
    if problem.lengths is not None:
        mask = torch.arange(problem.length) < torch.tensor(problem.lengths)[:, None]
    if problem.valid is not None:
        mask = torch.zeros(batch, problem.length, dtype=torch.bool)
        mask[:, problem.valid] = True
    offset, deciding = (None if x is None else torch.tensor(x) for x in (problem.offset, problem.deciding))
    size = problem.block_size
    config = FlexPrefillConfig(
        GAMMA, block_size=size, min_budget=problem.floor * size, selection="hybrid", index_queries=problem.rows
    )
    inputs = AttentionInputs(query, key, None, 1.0, window=problem.window, attention_mask=mask, offset=offset, deciding=deciding)
    return inputs, config


def assert_kept(keep: torch.Tensor, problem: Problem) -> None:
    found = {place: [set(row.nonzero().flatten().tolist()) for row in keep[place[0], :, place[1]]] for place in problem.kept}
    assert found == {place: [blocks, blocks] for place, blocks in problem.kept.items()}


def search_with(search: Any, problem: Problem) -> Any:
    inputs, config = problem_inputs(problem)
    half = torch.full((2,), GAMMA, dtype=torch.float64)
    return search(inputs, config, half, torch.tensor(0.0, dtype=torch.float64), True, True)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_plain_search(problem):
    found = search_with(plain_search, problem)
    assert_kept(found.keep, problem)
    # the lines are the same for every query block
    if problem.floor == 2:
        assert (found.stats[3] == 1).all() and (found.stats[4] == 1).all()


@pytest.mark.parametrize("name", [name for name, problem in PROBLEMS.items() if problem.deciding is None])
def test_reference(name):
    problem = PROBLEMS[name]
    inputs, config = problem_inputs(problem)
    options = {name: getattr(config, name) for name in ("block_size", "min_budget", "selection", "index_queries")}
    found = reference_flexprefill(
        inputs.query, inputs.key, GAMMA, **options, scale=1.0, window=inputs.window,
        attention_mask=inputs.attention_mask, q_offset=inputs.offset,
    )  # fmt: skip
    assert_kept(found.keep, problem)


# the interpreter takes over a second for each; the plain search has them all
LIKE_OTHERS = {"aligned", "no floor", "largest floor", "window within reach"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels run there")
@pytest.mark.parametrize(
    "problem",
    [pytest.param(problem, id=name, marks=pytest.mark.slow if name in LIKE_OTHERS else []) for name, problem in PROBLEMS.items()],
)
def test_kernels(problem):
    pytest.importorskip("triton", minversion="3.6", reason="older interpreters do not run with today's NumPy")
    from flexmask.kernels.search import search

    found, plain = search_with(search, problem), search_with(plain_search, problem)
    assert_kept(found.keep, problem)
    assert all(torch.equal(*pair) for pair in zip(found.lists, plain.lists, strict=True))
    for got, expected in zip(found.stats, plain.stats, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)
