"""Joined parts against attention to all keys, in float64."""

import math

import pytest
import torch

pytest.importorskip("triton")
from flexmask.kernels.last_rows import join_parts


@pytest.mark.parametrize(("parts", "rows", "head_dim"), [(2, 1, 64), (8, 5, 80), (11, 13, 128), (19, 16, 16)])
@pytest.mark.parametrize("with_lse", [True, False])
def test_joined_parts_are_attention_to_all_keys(device, parts, rows, head_dim, with_lse):
    """Also of rows that see no key of some parts, or of none, in memory with other rows between."""
    batch, num_heads, keys = 2, 3, 4
    scores = 20 * torch.randn(parts, batch, num_heads, rows, keys, dtype=torch.float64, device=device)
    scores[0, :, :, 0] = scores[1:, 1, 2, 0] = -math.inf
    values = torch.randn(parts, batch, num_heads, keys, head_dim, dtype=torch.float64, device=device)
    dtype = torch.bfloat16 if head_dim == 128 else torch.float32
    part_lse = torch.full((batch, num_heads, parts, rows + 3), math.nan, device=device)[..., 3:].movedim(2, 0)
    part_out = torch.full((batch, parts, rows + 2, num_heads, head_dim), math.nan, dtype=dtype, device=device)
    part_out = part_out[:, :, 2:].permute(1, 0, 3, 2, 4)
    part_lse.copy_(scores.logsumexp(-1))
    part_out.copy_(scores.softmax(-1).nan_to_num() @ values)
    whole = torch.full((batch, rows + 4, num_heads, head_dim), 7.0, dtype=dtype, device=device).transpose(1, 2)
    whole_lse = torch.full((batch, num_heads, rows + 4), 7.0, device=device)
    join_parts(part_out, part_lse, whole[:, :, 4:], whole_lse[..., 4:] if with_lse else None)
    of_all = scores.movedim(0, -2).flatten(-2)
    expected = of_all.softmax(-1).nan_to_num() @ values.movedim(0, -3).flatten(-3, -2)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(whole[:, :, 4:].double(), expected, atol=tolerance, rtol=tolerance)
    assert (whole[:, :, :4] == 7).all() and (whole_lse[..., :4] == 7).all()
    wanted = of_all.logsumexp(-1) if with_lse else torch.full_like(of_all[..., 0], 7)
    torch.testing.assert_close(whole_lse[..., 4:].double(), wanted, atol=1e-4, rtol=1e-5)
    assert (expected[1, 2, 0] == 0).all() and (wanted[1, 2, 0] == (-math.inf if with_lse else 7))
