"""Edges of blocks by the kernels against the plain steps."""

import pytest
import torch

from flexmask.base.visibility import block_edges, block_visibility, candidate_lines, valid_keys
from tests.kernels.support import DEVICE, geometry, tokens_of

pytest.importorskip("triton")

from flexmask.kernels.visibility import edges_of


@pytest.mark.parametrize("window", [None, 1, 48, 49])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (129, 129), (37, 300), (91, 139)])
def test_edges(q_len, kv_len, padded, window):
    block_size = 16
    call = geometry(2, q_len, kv_len, padded, window)
    if padded:  # whole blocks of it, too
        call.attention_mask[0, : kv_len // 3] = False
        call.attention_mask[1, kv_len // 2 :] = False
    if q_len == 37:  # rows amid the keys
        call = call.with_fields(offset=torch.tensor([0, 101], dtype=torch.int32, device=DEVICE))
    tokens, found = tokens_of(call), edges_of(call, block_size)
    edges, seen = block_edges(tokens, block_size), block_visibility(tokens, block_size, window)
    last_whole_key = torch.where(edges.rows_whole, edges.first_row, -1)
    rows = (
        edges.last_row, edges.first_row, edges.first_valid_row, edges.own_first, edges.own_last, last_whole_key,
        seen.visible.sum(-1),
    )  # fmt: skip
    counts = valid_keys(tokens, block_size)
    keys = (edges.last_valid_key, edges.keys_whole, counts, *candidate_lines(tokens, block_size, window))
    for got, expected in ((found.rows, rows), (found.keys, keys)):
        for number, (plane, wanted) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(plane, wanted.int().expand(plane.shape)), number
