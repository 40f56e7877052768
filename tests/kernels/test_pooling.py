"""Block means by the kernel against the plain step."""

import pytest
import torch

from flexmask.plain.pooling import block_means
from tests.kernels.support import DEVICE, LAYOUTS, in_layout, normal

pytest.importorskip("triton")

from flexmask.kernels import pooling as kernels


@pytest.mark.parametrize(("length", "block_size", "head_dim"), [(100, 16, 24), (97, 48, 64), (256, 128, 32), (1, 64, 16)])
def test_means_of_wanted_heads(length, block_size, head_dim):
    x = normal(2, 3, head_dim, length).transpose(-1, -2)
    everything = torch.ones(1, length, dtype=torch.bool, device=DEVICE)
    torch.testing.assert_close(kernels.block_means(x, None, None, block_size), block_means(x, everything, block_size))
    valid = normal(2, length, seed=1) < 0.5
    x = torch.where(valid[:, None, :, None], x, float("nan"))
    wanted = torch.tensor([[True, False, True], [True, True, True]], device=DEVICE)
    got = kernels.block_means(x, valid, wanted, block_size)
    torch.testing.assert_close(got[wanted], block_means(x, valid, block_size)[wanted])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_of_any_layout(layout):
    x = in_layout(layout, 2, 3, 50, 24)
    torch.testing.assert_close(kernels.block_means(x, None, None, 16), block_means(x, None, 16))
