"""Hybrid's own kernels against the plain steps of the same names, each on the same numbers, in the interpreter."""

import pytest
import torch

from flexmask import plain as shared
from flexmask.base.blocks import BlockProblem, block_problem
from flexmask.base.inputs import attention_inputs
from flexmask.base.visibility import candidate_lines
from flexmask.block_masks.hybrid import plain
from tests.cases import structured_inputs

pytest.importorskip("triton")

from flexmask import kernels as shared_kernels
from flexmask.block_masks.hybrid import kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels run there")
BLOCK = 16
# a batch row without padding, one with, and one of padding alone
MASK = torch.tensor([[1] * 110, [0] * 37 + [1] * 73, [0] * 110])


def problems(q_len=90, heads=2, sharpness=5.0, padded=True, **scores):
    """One call cut into blocks for both."""
    query, key = structured_inputs(torch.Generator().manual_seed(2), 3, heads, 1, q_len, 110, 16, sharpness)
    inputs = attention_inputs(query, key, attention_mask=MASK if padded else None, **scores).with_offset()
    edges = shared_kernels.kernel_geometry(inputs, BLOCK)
    return block_problem(inputs, BLOCK, shared), BlockProblem(inputs, BLOCK, shared_kernels, True, edges)


@pytest.mark.parametrize(
    "scores", [{}, {"window": 40}, {"window": 2**63 - 1}, {"q_offset": torch.tensor([20, 3, 7], dtype=torch.int32)}], ids=str
)
@pytest.mark.parametrize("padded", [True, False])
def test_the_most_blocks_seen(scores, padded):
    of_plain, of_kernels = problems(padded=padded, **scores)
    assert torch.equal(of_kernels.kernel_geometry.max_seen.long(), of_plain.num_blocks_seen().amax(-1).expand(3))
    for tokens in (1, 111, 300):
        one, other = problems(padded=padded, prompt_len=tokens, **scores)
        assert torch.equal(other.max_num_blocks_seen().long(), one.max_num_blocks_seen().expand(3))
    # the short window's blocks are all in this chunk
    assert torch.equal(other.max_num_blocks_seen()[:2], of_kernels.kernel_geometry.max_seen[:2]) == (scores.get("window") == 40)


# float32 has no such number below 1
HIGH = 1 - 1e-9
BY_HEAD = torch.tensor([0.6, 0.95, HIGH], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
def test_key_blocks_of_the_last_rows():
    """Also of a head with a row of NaN."""
    problem, of_kernels = problems(heads=3)
    problem.inputs.query[0, 1, -3] = torch.nan
    last, mass = of_kernels.steps.representative_mass(of_kernels, "last"), shared.representative_mass(problem, "last")
    candidates = candidate_lines(problem.visibility)[0].unsqueeze(1)
    for gamma, multiple in ((BY_HEAD, 2.0), (BY_HEAD, 1e9), (0.6, 4.0), (HIGH, 1e9)):
        expected = plain.key_blocks(problem, mass, problem.as_tensor(gamma, (3,)), multiple)
        assert torch.equal(kernels.key_blocks(of_kernels, last, gamma, multiple) != 0, expected)
        assert expected.any() and not torch.equal(expected, candidates.expand_as(expected))


# gamma, multiple of even shares, floor: of 0.8 six halvings hold it in some query blocks
A_TENSOR = torch.tensor(0.7, dtype=torch.float64)
CHOICES = ((BY_HEAD, 3.0, 0), (HIGH, 4e9, 0.7), (BY_HEAD, 100.0, 0.8), (0.6, 20.0, A_TENSOR))


@pytest.mark.parametrize(("scores", "choices"), [({}, CHOICES), ({"window": 40}, CHOICES[:2])], ids=["causal", "window"])
def test_blocks_of_the_rows(monkeypatch, scores, choices):
    """Of drawn evidence, with rows that hold NaN or nothing, and many tiles of few columns."""
    monkeypatch.setattr(kernels, "_COLUMNS", 2)
    of_plain, of_kernels = problems(q_len=110, heads=3, **scores)
    visible = of_plain.visible.expand(-1, 3, -1, -1)
    share = (4 * torch.rand(visible.shape)).exp() * visible
    share = share / share.sum(-1, keepdim=True).clamp(min=1)
    number = torch.randint(0, 3, share.shape[:3], dtype=torch.int32)
    share[number == 0] = 0
    share[0, 0, 5, 4] = torch.nan
    number[0, 0, 5] = 2
    squares = (share * share * number.clamp(min=1)[..., None]).masked_fill(~visible[:1], torch.nan)
    monkeypatch.setattr(kernels, "squares_of_shares", lambda *_: (squares, number))
    monkeypatch.setattr(plain, "row_evidence", lambda *_: plain.RowEvidence(share, share))
    for gamma, multiple, coverage in choices:
        expected = plain.row_blocks(of_plain, 8, of_plain.as_tensor(gamma, (3,)), multiple, coverage)
        chosen = kernels.row_blocks(of_kernels, 8, gamma, multiple, coverage).blocks.chosen
        assert torch.equal(chosen[visible] != 0, expected.blocks.chosen[visible])
