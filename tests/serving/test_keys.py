"""Cached keys and those of the step, in one tensor."""

import pytest
import torch

from flexmask.integrations.serving.layers import after_cached

HEADS, DIM, BEFORE, ROWS = 3, 8, 40, 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_rows_stand_behind_the_cached_ones(dtype):
    own, cached = torch.randn(ROWS, HEADS, DIM).to(dtype), torch.randn(BEFORE, HEADS, DIM).to(dtype).transpose(0, 1)
    made = after_cached(cached, own)
    assert made.is_contiguous()
    assert torch.equal(made, torch.cat([cached, own.transpose(0, 1)], 1))
    first = after_cached(None, own)
    assert first.is_contiguous()
    assert torch.equal(first, own.transpose(0, 1))
    # a cache is written to in place
    assert first.data_ptr() != own.data_ptr()


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.03, torch.tensor(0.03), torch.tensor([0.5, 0.03, 7.0])])
def test_only_cached_rows_are_scaled_and_rounded_once(cache, dtype, scale):
    own, cached = torch.randn(ROWS, HEADS, DIM).to(dtype), torch.randn(HEADS, BEFORE, DIM).to(cache)
    made = after_cached(cached, own, scale)
    factor = torch.as_tensor(scale).float().view(-1, 1, 1).double()
    # 0.03 is no number of bfloat16: a scale in the dtype of the rows is off by up to 2**-9
    assert torch.equal(made[:, :BEFORE], (cached.double() * factor).to(dtype))
    assert torch.equal(made[:, BEFORE:], own.transpose(0, 1))


@pytest.mark.parametrize("scale", [None, 0.03])
def test_skipped_tokens_are_zero(scale):
    own, cached = torch.randn(ROWS, HEADS, DIM), torch.randn(HEADS, BEFORE, DIM)
    made = after_cached(cached, own, scale, 5)
    assert not made[:, :5].any()
    assert torch.equal(made[:, 5:], after_cached(cached, own, scale))
