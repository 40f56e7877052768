"""Hybrid's thresholds by the kernel against the plain step."""

import pytest
import torch

from flexmask import plain
from flexmask.base.blocks import cut_into_blocks
from flexmask.block_masks import hybrid
from tests.kernels.support import DEVICE, geometry

pytest.importorskip("triton")

from flexmask import kernels


# block size 16: the thresholds' length is 1,024 blocks
@pytest.mark.parametrize(
    ("q_len", "kv_len", "padded", "window"),
    [(1, 1, False, None), (129, 129, False, None), (40000, 40000, False, None), (1000, 20000, False, None), (300, 300, True, 90)],
)
def test_equals_the_plain_step(q_len, kv_len, padded, window):
    call = geometry(2, q_len, kv_len, padded, window)
    if padded:
        call.attention_mask[1] = False
    gamma = torch.tensor([1e-3, 0.5, 0.9, 0.95, 0.999, 1 - 1e-7, 1.0], dtype=torch.float64, device=DEVICE)
    expected, found = (hybrid.thresholds(cut_into_blocks(call, 16, steps), gamma) for steps in (plain, kernels))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted.expand(got.shape), rtol=1e-13, atol=0, equal_nan=True)
