"""Hybrid's own kernels against the plain steps of the same names, each on the same numbers, in the interpreter."""

import pytest
import torch

from flexmask import plain as shared
from flexmask.base.blocks import BlockProblem, cut_into_blocks
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks.hybrid import RULE, plain
from tests.cases import structured_inputs

pytest.importorskip("triton")

from flexmask import kernels as shared_kernels
from flexmask.block_masks.hybrid import kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels run there")
BLOCK = 16
# a batch row without padding, one with, and one of padding alone
MASK = torch.tensor([[1] * 110, [0] * 37 + [1] * 73, [0] * 110])


def problems(q_len=90, heads=2, sharpness=5.0, **scores):
    """One call cut into blocks for both."""
    query, key = structured_inputs(torch.Generator().manual_seed(2), 3, heads, 1, q_len, 110, 16, sharpness)
    inputs = attention_inputs(query, key, attention_mask=MASK, **scores).with_offset()
    edges = shared_kernels.edges_of(inputs, BLOCK)
    return cut_into_blocks(inputs, BLOCK, shared), BlockProblem(inputs, BLOCK, shared_kernels, True, edges)


@pytest.mark.parametrize("length", [RULE.length, 64, 20])
def test_thresholds(monkeypatch, length):
    monkeypatch.setattr(kernels, "_Q_BLOCKS", 4)
    gammas = (0.3, 0.95, 0.9999, 1 - 1e-9, 1.0)
    of_plain, of_kernels = problems(heads=len(gammas))
    for gamma in (torch.tensor(gammas, dtype=torch.float64), *gammas):
        expected = plain.thresholds(of_plain, of_plain.as_tensor(gamma, (len(gammas),)), RULE._replace(length=length))
        found = kernels.thresholds(of_kernels, gamma, RULE._replace(length=length))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs.expand_as(ours), rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("with_nan", [False, True])
def test_lines_of_the_last_rows(with_nan):
    problem, of_kernels = problems()
    if with_nan:
        problem.inputs.query[0, 1, -3] = torch.nan
    last, mass = of_kernels.steps.representative_mass(of_kernels, "last"), shared.representative_mass(problem, "last")
    for of_key_block, of_diagonal in ((0.3, 0.1), (0.1, 0.3), (0.5, 0.02)):
        least = torch.tensor([of_key_block, of_diagonal], dtype=torch.float64)[:, None, None] * torch.tensor([1.0, 0.6])
        least = least.expand(2, 3, 2).contiguous()
        for near in (0, 1, 3, 2**62):
            expected = plain.last_rows_lines(problem, mass, least, near)
            assert torch.equal(kernels.last_rows_lines(of_kernels, last, least, near) != 0, expected)
            assert expected.any()


@pytest.mark.parametrize("scores", [{}, {"window": 40}], ids=str)
def test_blocks_of_the_rows(monkeypatch, scores):
    """Of drawn evidence, with rows that hold NaN or nothing, and many tiles of few columns."""
    monkeypatch.setattr(kernels, "_COLUMNS", 2)
    of_plain, of_kernels = problems(q_len=110, heads=4, **scores)
    visible = of_plain.visible.expand(-1, 4, -1, -1)
    share = (4 * torch.rand(visible.shape)).exp() * visible
    share = share / share.sum(-1, keepdim=True).clamp(min=1)
    number = torch.randint(0, 3, share.shape[:3], dtype=torch.int32)
    share[number == 0] = 0
    share[0, 0, 5, 4] = torch.nan
    number[0, 0, 5] = 2
    squares = (share * share * number.clamp(min=1)[..., None]).masked_fill(~visible[:1], torch.nan)
    monkeypatch.setattr(kernels, "squares_of_shares", lambda problem, split: (squares, number))
    for least in (0.01, 0.3, 2.0, 60.0):
        thresholds = least * (0.5 + torch.rand(share.shape[:3], dtype=torch.float64))
        for coverage in (0, 0.2, 0.7, 1.0, torch.tensor(0.7, dtype=torch.float64)):
            expected = plain.row_blocks(of_plain, plain.RowEvidence(share, share), thresholds, 1 / 16, coverage)
            codes = kernels.row_blocks(of_kernels, None, thresholds, 1 / 16, coverage).codes
            assert torch.equal(codes[visible] & 2 != 0, expected.chosen[visible])
            assert torch.equal(codes[visible] & 1 != 0, expected.lines[visible])
