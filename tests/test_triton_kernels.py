"""The Triton kernels against the plain code they stand in for: on a GPU for real, elsewhere in Triton's interpreter.

`tests/conftest.py` switches the interpreter on where there is no GPU. It has no bfloat16 arithmetic: that is for GPUs only.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexmask.emit import block_lists
from flexmask.pooling import block_means
from flexmask.representative import (
    RowSums,
    representative_attention,
    representative_rows,
    summed_attention,
    take_rows,
)
from flexmask.selection import covering_map
from flexmask.visibility import token_validity

pytest.importorskip("triton")

import flexmask.selection
from flexmask.triton_lists import launch_lists
from flexmask.triton_means import launch_means
from flexmask.triton_row_sums import launch_row_sums
from flexmask.triton_threshold import launch_threshold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def row_sums(case: dict, dtype: torch.dtype) -> tuple[RowSums, RowSums]:
    """What the kernel gives, rescaled, and what plain code gives."""
    batch, heads, kv_heads, q_len, kv_len, block_size, head_dim = case["shape"]
    query = (2 * normal(batch, heads, q_len, head_dim)).to(dtype)
    key = normal(batch, kv_heads, kv_len, head_dim, seed=1).to(dtype)
    mask = (torch.rand(batch, kv_len, generator=torch.Generator().manual_seed(2)) < 0.7).to(DEVICE) if case["padded"] else None
    tokens = token_validity(q_len, kv_len, None, mask, key)
    rows = representative_rows("last", tokens, block_size)
    taken = take_rows(query, rows)
    scores = (head_dim**-0.5, case["softcap"], case["window"])
    peak, sums = launch_row_sums(taken, key, rows.position, rows.taken, tokens.key_valid, case["padded"], *scores)
    assert peak.isfinite().logical_or(peak == float("-inf")).all()
    highest = peak.amax(-1, keepdim=True)
    weight = torch.exp2(peak - torch.where(highest == float("-inf"), 0.0, highest))
    total = (sums[0] * weight).sum(-1, keepdim=True)
    weight = weight / torch.where(total == 0, 1.0, total)
    expected = summed_attention(representative_attention(taken, key, rows, tokens, *scores), rows, block_size)
    return RowSums(*(part * weight for part in sums)), expected


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        {"shape": (1, 2, 1, 70, 70, 16, 32), "softcap": None, "window": None, "padded": False},
        {"shape": (2, 2, 1, 50, 80, 48, 24), "softcap": 5.0, "window": 40, "padded": True},
        {"shape": (1, 2, 2, 100, 150, 64, 64), "softcap": None, "window": None, "padded": False},
        {"shape": (2, 1, 1, 20, 40, 32, 80), "softcap": None, "window": None, "padded": True},
        {"shape": (1, 1, 1, 130, 140, 128, 128), "softcap": None, "window": 100, "padded": False},
        {"shape": (1, 1, 1, 1, 33, 256, 16), "softcap": None, "window": None, "padded": False},
    ],
    ids=lambda case: "x".join(map(str, case["shape"])),
)
def test_row_sums_equal_the_plain_sums(case: dict, dtype: torch.dtype) -> None:
    got, expected = row_sums(case, dtype)
    for part, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(part, plain, atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 7), (3, 1100)])
@pytest.mark.parametrize("shared", [True, False])
def test_lists_equal_the_plain_lists(rows: int, columns: int, shared: bool) -> None:
    keep = normal(2, 2, rows, columns) < -0.5
    full = normal(1 if shared else 2, rows, columns, seed=1) < 0
    for got, expected in zip(launch_lists(keep, full), block_lists(keep, full), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("length", "block_size", "head_dim"), [(100, 16, 24), (97, 48, 64), (256, 128, 32), (1, 64, 16)])
def test_means_equal_the_plain_means_of_wanted_heads(length: int, block_size: int, head_dim: int) -> None:
    x = normal(2, 3, head_dim, length).transpose(-1, -2)
    valid = normal(2, length, seed=1) < 0.5
    x = torch.where(valid[:, None, :, None], x, float("nan"))
    wanted = torch.tensor([[True, False, True], [True, True, True]], device=DEVICE)
    got = launch_means(x, valid, wanted, block_size)
    torch.testing.assert_close(got, block_means(x, valid, block_size) * wanted[..., None, None])


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (10, 10), (60, 150)])
@pytest.mark.parametrize("gamma", [0.3, 0.95])
def test_threshold_selects_what_a_sort_selects(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, gamma: float) -> None:
    monkeypatch.setattr(flexmask.selection, "threshold", launch_threshold, raising=False)
    values = normal(1, 5, rows, columns).sigmoid() ** 6
    values[0, 1] = values[0, 1].round(decimals=1)  # many ties, zeros among them
    values[0, 3] = 0.25  # nothing but ties
    candidates = normal(1, 1, rows, columns, seed=1) < 0.8
    active = torch.tensor([[True, True, False, True, True]], device=DEVICE)
    share = torch.tensor(gamma, dtype=torch.float64, device=DEVICE)
    got = flexmask.selection.fused_covering_map(values, candidates, share, active)
    assert torch.equal(got, covering_map(values, candidates, share, active))
    assert not got[0, 2].any()
