"""The representative attention by kernels, and V and S from it, against the plain steps."""

import pytest
import torch

from flexmask.base.blocks import cut_into_blocks
from flexmask.base.visibility import candidate_lines
from flexmask.plain import vertical_slash
from flexmask.plain.vertical_slash import representative_attention, representative_rows
from tests.kernels.support import HALF, LAYOUTS, call_of, geometry, in_layout, normal, tokens_of

pytest.importorskip("triton")

from flexmask import kernels
from flexmask.kernels.representative import block_sums
from flexmask.kernels.vertical_slash import line_mass
from flexmask.kernels.visibility import WHICH, edges_of


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (40, 40), (1, 300), (130, 300), (1500, 1500)])
def test_representative_rows(q_len, kv_len, padded):
    call = geometry(3, q_len, kv_len, padded)
    if padded:  # one batch row has one token, one a few
        call.attention_mask[1, :-1] = False
        call.attention_mask[2, :-5] = False
    for which, got in zip(WHICH, edges_of(call, 16).last_rows, strict=True):
        tokens = tokens_of(call)
        rows = representative_rows(which, tokens, 16)
        assert torch.equal(got[:, 0].expand(rows.row.shape[0]), tokens.offset.int().expand(rows.row.shape[0]))
        assert torch.equal(got[:, 1:].expand(rows.row.shape), torch.where(rows.taken, rows.row, -1).int())


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
        ((1, 1, 1, 1, 33, 512, 16), None, None, False),
    ],
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else str(x),
)
def test_lines_of_the_representative_attention(shape, softcap, window, padded, dtype):
    batch, heads, kv_heads, q_len, kv_len, block_size, head_dim = shape
    query = (2 * normal(batch, heads, q_len, head_dim)).to(dtype)
    key = normal(batch, kv_heads, kv_len, head_dim, seed=1).to(dtype)
    call = call_of(query, key, window, padded, softcap)
    tokens = tokens_of(call)
    if padded:  # what padding holds does not matter
        key = torch.where(tokens.key_valid[:, None, :, None], key, float("nan"))
    rows = representative_rows("last", tokens, block_size)
    candidates = candidate_lines(tokens, block_size, window)
    problem = cut_into_blocks(call.with_fields(key=key), block_size, kernels)
    mass = kernels.representative_mass(problem, "last")
    sums, norms = mass.sums, mass.norms
    vertical, slash = line_mass(mass, problem.edges)

    zeros = torch.where(tokens.key_valid[:, None, :, None], key, 0.0)
    attention = representative_attention(call.with_fields(key=zeros), rows, tokens)
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
    calls = (call_of(*tensors.values()), call_of(*(x.contiguous() for x in tensors.values())))
    got, expected = (block_sums(call, edges_of(call, 16).last_rows[0], 16) for call in calls)
    torch.testing.assert_close(got.blocks, expected.blocks)
    torch.testing.assert_close(got.chunks, expected.chunks)


def test_block_sums_as_they_are_stored_on_amd(monkeypatch):
    call = call_of(normal(1, 4, 40, 16), normal(1, 2, 300, 16, seed=1))
    rows = edges_of(call, 16).last_rows[0]
    expected = block_sums(call, rows, 16)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    got = block_sums(call, rows, 16)
    assert torch.equal(got.blocks, expected.blocks)
    assert torch.equal(got.chunks, expected.chunks)
