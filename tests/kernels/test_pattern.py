"""Estimate, pattern and kept lines by kernels against the plain steps."""

from types import SimpleNamespace

import pytest
import torch

from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import AttentionInputs
from flexmask.base.scores import masked_softmax, ranks, top_p_count
from flexmask.base.visibility import blocks_seen_by_rows
from flexmask.plain.pattern import jensen_shannon_distance
from flexmask.plain.pooling import block_means
from flexmask.plain.vertical_slash import representative_rows, take_rows
from tests.kernels.support import DEVICE, HALF, LAYOUTS, by_head, call_of, float64, in_layout, normal, tokens_of

pytest.importorskip("triton")

from flexmask import kernels as steps
from flexmask.kernels import pattern as kernels
from flexmask.kernels.visibility import PackedEdges


def assert_scores_as_expected(call, block_size):
    query, key, window, tokens = call.query, call.key, call.window, tokens_of(call)
    rows = representative_rows("last", tokens, block_size)
    means = block_means(key, tokens.key_valid, block_size)
    sees = (blocks_seen_by_rows(rows.position, tokens, block_size, window) & rows.taken.unsqueeze(-1)).any(-2)
    mean_row = take_rows(query, rows).float().sum(2, keepdim=True) / rows.taken.sum(-1)[:, None, None, None]
    scores = (mean_row @ means.repeat_interleave(query.shape[1] // key.shape[1], 1).mT).squeeze(2)
    problem = cut_into_blocks(call, block_size, steps)
    torch.testing.assert_close(
        kernels.estimated_scores(problem, means, problem.edges.last_rows[0]),
        torch.where(sees[:, None], scores, float("-inf")),
        atol=1e-4,
        rtol=1e-4,
    )
    return sees


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 1, 70, 70, 16, 32),
        (2, 2, 1, 50, 80, 48, 24),
        (1, 2, 2, 100, 150, 64, 64),
        (1, 1, 1, 130, 140, 128, 128),
        (1, 1, 1, 1, 33, 256, 16),
    ],
    ids=lambda x: "x".join(map(str, x)),
)
def test_estimated_scores(shape, dtype):
    batch, heads, kv_heads, q_len, kv_len, block_size, head_dim = shape
    query = normal(batch, heads, q_len, head_dim).to(dtype)
    key = normal(batch, kv_heads, kv_len, head_dim, seed=1).to(dtype)
    assert_scores_as_expected(call_of(query, key), block_size)


@pytest.mark.parametrize("padded", [False, True])
def test_estimated_scores_within_a_window(padded):
    query, key = normal(2, 2, 30, 16), normal(2, 1, 203, 16, seed=1)
    seen = set()
    # every window crosses an edge of a block somewhere
    for window in range(94, 114):
        seen.add(int(assert_scores_as_expected(call_of(query, key, window, padded), 16).sum()))
    assert len(seen) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_estimated_scores_of_any_layout(layout):
    query = in_layout(layout, 2, 4, 40, 16)
    assert not query.is_contiguous()
    assert_scores_as_expected(call_of(query, normal(2, 2, 60, 16, seed=1)), 16)


def pattern_of(monkeypatch, lines, estimate, rows, count, inputs, shares, budget):
    """Pattern and lines of given masses and scores."""
    monkeypatch.setattr(kernels, "line_mass", lambda *_: lines.contiguous())
    monkeypatch.setattr(kernels, "estimated_scores", lambda *_: estimate)
    mass = SimpleNamespace(rows=rows, sums=None, norms=None)
    edges = PackedEdges(count.new_empty((7, *count.shape)), count.expand(5, *count.shape).contiguous(), rows)
    problem = SimpleNamespace(block_size=16, inputs=inputs, edges=edges)
    is_query_aware, distance, kept = kernels.pattern_and_lines(problem, mass, mass, None, shares, budget)
    return SimpleNamespace(is_query_aware=is_query_aware, distance=distance, lines=kept)


@pytest.mark.parametrize("blocks", [1, 40, 300])
@pytest.mark.parametrize(
    ("gamma", "floor", "cap"),
    [(0.6, 0, None), (0.9, 5, None), (0.9, 0, 3), (1.0, 0, None), (1.0, 2, 7), ([0.2, 1.0, 0.9, 0.5, 0.99, 1.0], 1, None)],
    ids=str,
)
def test_pattern_and_lines(blocks, gamma, floor, cap, monkeypatch):
    heads = 6
    lines = normal(2, 1, heads, blocks).softmax(-1)
    lines[0, 0, 1] = 1 / blocks  # nothing but ties
    lines[1, 0, 2] = lines[1, 0, 2].round(decimals=2)  # many ties, zeros among them
    lines[:, 0, 3, 2:] = 0  # fewer than a floor may ask for
    candidates = normal(2, 1, blocks, seed=1) < 1
    candidates[..., 0] = True
    values = torch.where(candidates.unsqueeze(2), lines, 0.0)
    estimate = 2 * normal(1, heads, blocks, seed=3)
    sees = normal(1, blocks, seed=4) < 1
    sees[..., 0] = True
    count = torch.full((1, blocks), 16, dtype=torch.int32, device=DEVICE)
    count[..., -1] = 3
    rows = torch.arange(-1, 16, device=DEVICE, dtype=torch.int32)[None]  # an offset goes first
    tau = float64(0.5)
    inputs = AttentionInputs(lines, lines, None, 0.7, 4.0)
    shown = torch.where(candidates.unsqueeze(2), lines, -1.0)
    chosen = pattern_of(
        monkeypatch, shown, torch.where(sees[:, None], estimate, float("-inf")), rows, count, inputs,
        (by_head(gamma, heads), tau), (floor, cap),
    )  # fmt: skip

    scores = 4.0 * torch.tanh(0.7 * estimate / 4.0) + count.log()[:, None]
    estimated = torch.where(sees[:, None], masked_softmax(scores, sees[:, None]), 0.0)
    distance = jensen_shannon_distance(estimated, values[0])
    torch.testing.assert_close(chosen.distance, distance, atol=1e-5, rtol=1e-5)
    assert torch.equal(chosen.is_query_aware, distance.double() < tau)
    available = candidates.sum(-1, keepdim=True)
    number = top_p_count(values, candidates.unsqueeze(2), by_head(gamma, heads))
    number = number.clamp(max=blocks if cap is None else cap)
    number = torch.where(chosen.is_query_aware, 0, number).maximum(available.clamp(max=floor))
    assert torch.equal(chosen.lines.number, number)
    assert torch.equal(chosen.lines.kept.bool(), ranks(lines, candidates.unsqueeze(2)) < number.unsqueeze(-1))


def test_a_row_of_padding_is_not_query_aware(monkeypatch):
    heads, blocks = 3, 5
    lines, estimate = normal(2, 2, heads, blocks).softmax(-1), normal(2, heads, blocks, seed=1)
    rows = torch.arange(-1, 16, device=DEVICE, dtype=torch.int32).expand(2, -1).clone()
    rows[1, 1:] = -1
    count = torch.tensor([[16, 16, 16, 16, 3], [5, 1, 16, 9, 2]], dtype=torch.int32, device=DEVICE)
    inputs = AttentionInputs(lines, lines, None, 0.7)
    shares = (by_head(0.6, heads), float64(1.0))
    chosen = pattern_of(monkeypatch, lines, estimate, rows, count, inputs, shares, (0, None))
    estimated = (0.7 * estimate + count.log()[:, None]).softmax(-1)
    torch.testing.assert_close(chosen.distance, jensen_shannon_distance(estimated, lines[0]), atol=1e-5, rtol=1e-5)
    assert (chosen.distance < 1.0).all()
    assert chosen.is_query_aware.tolist() == [[True] * heads, [False] * heads]
    assert (chosen.lines.number[:, 0] == 0).all() and (chosen.lines.number[:, 1] > 0).all()
