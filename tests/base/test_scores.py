"""The softmax of scores over their own memory."""

import pytest
import torch

from flexmask.base.scores import masked_softmax


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 129), (4, 8, 1000), (1, 2, 128, 20000), (70, 1, 5)])
def test_softmax_over_its_own_memory_is_that_of_a_copy(shape):
    """Rows that see nothing or hold infinities or NaN, and other strides, included."""
    for strided in (False, True):
        scores = random(*shape, 2)[..., 0] if strided else random(*shape)
        visible = random(*shape, seed=1) < 0.5
        scores[..., :1, 0] = float("inf")
        scores[..., -1:, -1] = float("nan")
        visible[..., :1, 1:] = False
        expected = torch.where(visible, scores, torch.finfo(torch.float32).min).softmax(-1)
        got = masked_softmax(scores, visible)
        torch.testing.assert_close(got, expected, atol=0, rtol=0, equal_nan=True)
        assert got.data_ptr() == scores.data_ptr()
