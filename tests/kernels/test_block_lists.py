"""Index lists by the kernel against the plain step."""

from types import SimpleNamespace

import pytest
import torch

from flexmask.base.blocks import BlockProblem
from flexmask.base.visibility import block_visibility
from flexmask.plain import vertical_slash as plain
from flexmask.plain.vertical_slash import representative_rows
from tests.kernels.support import DEVICE, geometry, normal, tokens_of

pytest.importorskip("triton")

from flexmask.base.blocks import Lines
from flexmask.kernels import block_lists as kernels
from flexmask.kernels.visibility import edges_of


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window", "padded"),
    [
        (1, 1, None, False),
        (90, 150, 60, True),
        (100, 2300, None, False),
        (70, 70, 20, False),
        # one more key shows another block at a window of 49 and fills another at 47
        (91, 139, 47, False),
        (91, 139, 48, False),
        (91, 139, 49, False),
        (91, 139, 49, True),
    ],
)
@pytest.mark.parametrize("chosen_by", ["lines", "lines and blocks", "rows and last rows"])
def test_lists_of_lines_and_blocks(q_len, kv_len, window, padded, chosen_by):
    size, heads = 16, 3
    inputs = geometry(2, q_len, kv_len, padded, window)
    tokens = tokens_of(inputs)
    seen, edges = block_visibility(tokens, size, window), edges_of(inputs, size)
    one, other = BlockProblem(inputs, size, steps=None, cut=(tokens, seen)), BlockProblem(inputs, size, steps=None, edges=edges)
    shape = (2, heads, seen.visible.shape[1], seen.visible.shape[2])
    vertical, slash = normal(2, 2, heads, shape[3], seed=1) < -1
    active = torch.tensor([[True, False, True], [False, True, False]], device=DEVICE)
    chosen, lines = normal(*shape, seed=2) < -1, normal(*shape, seed=3) < 0.5
    plain_blocks, blocks, rest = None, None, []
    if chosen_by == "lines and blocks":
        plain_blocks = plain.Blocks(chosen & active[..., None, None])
        blocks = kernels.Blocks(chosen.to(torch.int8), active)
    elif chosen_by == "rows and last rows":
        plain_blocks = plain.Blocks(chosen, lines)
        blocks = kernels.Blocks(2 * chosen.to(torch.int8) + lines.to(torch.int8), gated=True)
        rows = representative_rows("last", tokens, size)
        rest = [SimpleNamespace(rows=rows), (2, 4)]
    kept = torch.stack([vertical, slash])
    expected, keep = plain.kept_blocks(one, Lines(kept), plain_blocks, *rest)
    if rest:
        rest[0] = SimpleNamespace(rows=edges.last_rows[0])
    found, own = kernels.kept_blocks(other, Lines(kept.to(torch.int8)), blocks, *rest)
    assert torch.equal(own, keep)
    for got, wanted in zip(found, expected, strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, wanted)
