"""Every family with every kind of cache, padding and prefill, against dense attention and under its masks."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from flexmask.integrations.huggingface import PrefillRun, sparse_prefill
from tests.integrations.cells import ALL_CELLS, FEWER_CELLS, Cell, refusal, run_cell
from tests.integrations.common import KEEP_ALL
from tests.integrations.families import FAMILIES
from tests.integrations.support import Result
from tests.integrations.written_out import written_out

pytestmark = pytest.mark.attention

TOLERANCE = 1e-4
SPARSE: dict[str, Any] = {**KEEP_ALL, "gamma": 0.4, "tau": 0.13}
# few blocks lie in a window
SPARSE_IN_WINDOWS: dict[str, Any] = {"tau": 0.17}


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        cells = ALL_CELLS if metafunc.config.getoption("all_cells") else FEWER_CELLS
        metafunc.parametrize("cell", cells, ids=str)


@functools.cache
def model_of(family: str) -> Any:
    model = FAMILIES[family].make()
    model.set_attn_implementation(FAMILIES[family].dense)
    return model


def run_dense(cell: Cell) -> tuple[Tensor, Tensor | None]:
    return run_cell(model_of(cell.family), cell)


def run_sparse(cell: Cell, **settings: Any) -> tuple[Tensor, Tensor | None, PrefillRun]:
    model = model_of(cell.family)
    with sparse_prefill(model, **settings, collect_masks=True) as run:
        return *run_cell(model, cell), run


def difference(logits: Tensor, expected: Tensor) -> float:
    assert logits.shape == expected.shape
    return float((logits - expected).abs().max())


def test_equals_dense_attention(cell, keep_result):
    """With gamma 1; sparse, equal to attention written out under the masks, and far from dense."""
    refused = refusal(cell)
    if refused:
        reason, error, message = refused
        with pytest.raises(error, match=message):
            run_dense(cell)
        keep_result(Result(reason))
        return
    dense, chosen = run_dense(cell)
    logits, tokens, run = run_sparse(cell, **KEEP_ALL)
    at_gamma_one = difference(logits, dense)
    assert at_gamma_one < TOLERANCE
    assert tokens is None or torch.equal(tokens, chosen)
    assert not any(stats.dense for calls in run.stats.values() for stats in calls)

    layers = dict.fromkeys(FAMILIES[cell.family].sliding_layers(), SPARSE_IN_WINDOWS)
    logits, tokens, run = run_sparse(cell, **SPARSE, layers=layers)
    every = [stats for calls in run.stats.values() for stats in calls]
    query_aware = torch.stack([stats.is_query_aware for stats in every])
    assert torch.stack([stats.density for stats in every]).mean() < 0.7
    assert query_aware.any()
    assert not query_aware.all()
    assert difference(logits, dense) > 100 * TOLERANCE
    with written_out(model_of(cell.family), run.masks):
        expected, chosen = run_cell(model_of(cell.family), cell)
    under_its_masks = difference(logits, expected)
    assert under_its_masks < TOLERANCE
    assert tokens is None or torch.equal(tokens, chosen)
    keep_result(Result(None, at_gamma_one, under_its_masks))


def test_forward_refuses_a_chunk_size():
    cell = Cell("Llama", "dynamic", "unpadded", "one-shot", "forward")
    model = model_of(cell.family)
    with sparse_prefill(model, **KEEP_ALL), pytest.raises(NotImplementedError, match="prefill_chunk_size"):
        model(torch.ones(1, 40, dtype=torch.int64), prefill_chunk_size=20)
