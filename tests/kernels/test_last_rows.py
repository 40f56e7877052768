"""The lines of the last rows by the kernel against the plain step."""

import pytest
import torch

from flexmask import plain
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import attention_inputs
from tests.kernels.support import DEVICE, normal

pytest.importorskip("triton")

from flexmask import kernels


def lines_of(steps, inputs, thresholds, near, block_size=16):
    problem = cut_into_blocks(inputs, block_size, steps)
    last = steps.representative_mass(problem, "last")
    return steps.last_rows_lines(problem, last, thresholds, near), last


@pytest.mark.parametrize("near", [0, 1, 3, 2**62])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "options"),
    [
        (1, 1, {}),
        (63, 63, {}),
        (129, 129, {}),
        (1000, 1000, {}),
        (40, 300, {}),
        (200, 200, {"window": 90}),
        (300, 300, {"padded": True}),
    ],
    ids=str,
)
def test_equals_the_plain_step(q_len, kv_len, options, near):
    query, key = 3 * normal(2, 4, q_len, 32), normal(2, 2, kv_len, 32, seed=1)
    padding = None
    if options.get("padded"):
        padding = torch.arange(kv_len, device=DEVICE)[None] >= torch.tensor([[0], [70]], device=DEVICE)
    inputs = attention_inputs(query, key, attention_mask=padding, window=options.get("window")).with_offset()
    attention = lines_of(plain, inputs, torch.ones(2, 1, 4, device=DEVICE).double(), near)[1]
    # thresholds away from every share
    most = torch.where(attention.rows.taken[:, None, :, None], attention.mass.by_row, 0.0).amax(2)
    shares = most.flatten(2).quantile(torch.tensor(0.7, device=DEVICE), dim=2).double().clamp(min=1e-4)
    thresholds = torch.stack([shares, 0.3 * shares])
    expected, _ = lines_of(plain, inputs, thresholds, near)
    found, _ = lines_of(kernels, inputs, thresholds, near)
    kept = expected.kept
    assert torch.equal(found.number, found.kept.long().sum(-1))
    # a share within rounding of its threshold may fall either way
    assert (found.kept.bool() != kept).float().mean() <= 0.02
    assert (found.number - expected.number).abs().max() <= 2
    if kv_len > 100:
        assert kept.any() and not kept.all()


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
def test_shares_that_are_nan_drop_nothing():
    """A maximum drops NaN on a GPU."""
    query, key = 2 * normal(1, 2, 70, 32), normal(1, 1, 70, 32, seed=1)
    query[0, 1, 65] = torch.nan
    inputs = attention_inputs(query, key).with_offset()
    thresholds = torch.full((2, 1, 2), 0.5, device=DEVICE).double()
    (expected, _), (found, _) = (lines_of(steps, inputs, thresholds, 1) for steps in (plain, kernels))
    kept = expected.kept
    assert torch.equal(found.kept.bool(), kept)
    assert torch.equal(found.number, expected.number)
    assert not kept[:, 0, 0].all()
    assert kept[0, 0, 1].all()
