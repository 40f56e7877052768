"""The index lists by the kernel against the plain step."""

from __future__ import annotations

import pytest
import torch

from flexmask.base.inputs import AttentionInputs
from flexmask.base.visibility import block_visibility
from flexmask.plain.block_lists import block_lists
from flexmask.plain.vertical_slash import blocks_kept_always, extended_lines
from tests.kernels.support import DEVICE, normal, tokens_of

pytest.importorskip("triton")

from flexmask.kernels import block_lists as kernels
from flexmask.kernels.pattern import Lines
from flexmask.kernels.visibility import packed_edges


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window", "padded"),
    [
        (1, 1, None, False),
        (90, 150, 60, True),
        (100, 2300, None, False),
        (70, 70, 20, False),
        # rows begin with a block: at a window of 49 one more key shows another block, at 47 one more makes another block full
        (91, 139, 47, False),
        (91, 139, 48, False),
        (91, 139, 49, False),
        (91, 139, 49, True),
    ],
)
@pytest.mark.parametrize("with_chosen", [False, True])
def test_lists_of_lines_and_blocks(q_len, kv_len, window, padded, with_chosen):
    size, heads = 16, 3
    tokens = tokens_of(2, q_len, kv_len, padded)
    seen = block_visibility(tokens, size, window)
    shape = (2, heads, seen.visible.shape[1], seen.visible.shape[2])
    lines = normal(2, 2, heads, shape[3], seed=1) < -1
    active = torch.tensor([[True, False, True], [False, True, False]], device=DEVICE)
    chosen = normal(*shape, seed=2) < -1
    blocks = chosen.to(torch.int8) if with_chosen else None
    edges = packed_edges(tokens, size, window)
    kept = Lines(active, torch.empty(0), lines.to(torch.int8), torch.empty(0))
    inputs = AttentionInputs(torch.empty(0), torch.empty(2, 1, kv_len, 0), None, 1.0, None, window)
    *lists, keep = kernels.block_lists(kept, blocks, edges, inputs, size, True)
    expected = extended_lines(lines[0], lines[1], seen) | blocks_kept_always(seen)[:, None]
    if with_chosen:
        expected = expected | (chosen & active[..., None, None])
    expected = expected & seen.visible[:, None]
    assert torch.equal(keep, expected)
    for got, plain in zip(lists, block_lists(expected, seen.full), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, plain)
