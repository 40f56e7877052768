"""The representative attention by kernels, and V and S from it, against the plain steps."""

import pytest
import torch

from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import representative_rows
from flexmask.base.visibility import candidate_lines
from flexmask.plain import vertical_slash
from flexmask.plain.representative import representative_attention
from tests.kernels.support import HALF, LAYOUTS, in_layout, normal, tokens_of

pytest.importorskip("triton")

from flexmask.kernels.representative import block_sums, packed_rows
from flexmask.kernels.vertical_slash import line_mass, row_norms


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(
    ("shape", "softcap", "window", "padded"),
    [
        ((1, 2, 1, 70, 70, 16, 32), None, None, False),
        ((2, 2, 1, 50, 80, 48, 24), 5.0, 40, True),
        ((1, 2, 2, 100, 150, 64, 64), None, None, False),
        ((2, 1, 1, 20, 40, 32, 80), None, None, True),
        ((1, 1, 1, 130, 140, 128, 128), None, 100, False),
        ((1, 1, 1, 300, 340, 16, 16), 1e8, None, False),  # all but no cap
        ((1, 1, 1, 1, 33, 256, 16), None, None, False),
    ],
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else str(x),
)
def test_lines_of_the_representative_attention(shape, softcap, window, padded, dtype):
    batch, heads, kv_heads, q_len, kv_len, block_size, head_dim = shape
    query = (2 * normal(batch, heads, q_len, head_dim)).to(dtype)
    key = normal(batch, kv_heads, kv_len, head_dim, seed=1).to(dtype)
    tokens = tokens_of(batch, q_len, kv_len, padded)
    if padded:  # what padding holds does not matter
        key = torch.where(tokens.key_valid[:, None, :, None], key, float("nan"))
    rows = representative_rows("last", tokens, block_size)
    candidates = candidate_lines(tokens, block_size, window)
    scores = (head_dim**-0.5, softcap, window)
    packed = packed_rows(rows, tokens.offset)
    inputs = AttentionInputs(query, key, None, *scores)
    sums = block_sums(inputs, packed, tokens.key_valid if padded else None, block_size)
    norms = row_norms(sums)
    vertical, slash = line_mass(sums, norms, packed, candidates.int().contiguous())

    zeros = torch.where(tokens.key_valid[:, None, :, None], key, 0.0)
    attention = representative_attention(AttentionInputs(query, zeros, None, *scores), rows, tokens)
    plain = vertical_slash.line_mass(vertical_slash.row_mass(attention, rows, block_size), rows, block_size)
    for line, expected, wanted in zip((vertical, slash), (plain.vertical, plain.slash), candidates[:, :, None], strict=True):
        torch.testing.assert_close(line, torch.where(wanted, expected, -1.0), atol=3e-6, rtol=1e-4)
    by_row = torch.exp2(sums.blocks[..., 0] - norms.base.unsqueeze(-2)) * sums.blocks[..., 1] * norms.factor.unsqueeze(-2)
    torch.testing.assert_close(by_row.mT, plain.by_row, atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", ["query", "key"])
def test_block_sums_of_any_layout(layout, other):
    tensors = {"query": normal(2, 4, 40, 16), "key": normal(2, 2, 60, 16, seed=1)}
    tensors[other] = in_layout(layout, *tensors[other].shape, seed=2)
    assert not tensors[other].is_contiguous()
    tokens = tokens_of(2, 40, 60, False)
    packed = packed_rows(representative_rows("last", tokens, 16), tokens.offset)
    got, expected = (
        block_sums(AttentionInputs(*pair, None, 0.25), packed, None, 16)
        for pair in (tensors.values(), (x.contiguous() for x in tensors.values()))
    )
    torch.testing.assert_close(got.blocks, expected.blocks)
    torch.testing.assert_close(got.chunks, expected.chunks)


def test_block_sums_as_they_are_stored_on_amd(monkeypatch):
    tokens = tokens_of(1, 40, 300, False)
    packed = packed_rows(representative_rows("last", tokens, 16), tokens.offset)
    inputs = AttentionInputs(normal(1, 4, 40, 16), normal(1, 2, 300, 16, seed=1), None, 0.25)
    expected = block_sums(inputs, packed, None, 16)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    got = block_sums(inputs, packed, None, 16)
    assert torch.equal(got.blocks, expected.blocks)
    assert torch.equal(got.chunks, expected.chunks)
