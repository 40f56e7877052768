"""Each Triton kernel against the plain code it stands in for: on a GPU for real, elsewhere in Triton's interpreter.

`tests/conftest.py` switches the interpreter on where there is no GPU. It has no bfloat16 arithmetic: that is for GPUs only.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexmask.base.candidate_lines import candidate_lines
from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import representative_rows
from flexmask.base.scores import masked_softmax
from flexmask.base.visibility import Tokens, block_visibility, blocks_seen_by_rows, token_validity, valid_keys
from flexmask.config import FlexPrefillConfig
from flexmask.plain import vertical_slash
from flexmask.plain.block_lists import block_lists
from flexmask.plain.pattern import jensen_shannon_distance
from flexmask.plain.pooling import block_means, pooled_scores
from flexmask.plain.representative import representative_attention, take_rows
from flexmask.plain.top_p import ranks, top_p, top_p_count
from flexmask.plain.vertical_slash import blocks_kept_always, extended_lines

pytest.importorskip("triton")

from flexmask.kernels import block_lists as lists_kernel
from flexmask.kernels import pooling as pooling_kernel
from flexmask.kernels import query_aware_top_p
from flexmask.kernels.estimate import estimated_scores
from flexmask.kernels.pattern import Lines, pattern_and_lines
from flexmask.kernels.query_aware import pooled_map
from flexmask.kernels.query_aware_top_p import top_p_map, top_p_rows
from flexmask.kernels.representative import block_sums, packed_rows
from flexmask.kernels.vertical_slash import line_mass, row_norms
from flexmask.kernels.visibility import packed_edges

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,)


@pytest.fixture(autouse=True)
def _few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other: 64 chunks of rows a pass take it seconds."""
    if DEVICE == "cpu":
        monkeypatch.setattr(query_aware_top_p, "_MEDIUM", (5, 4))
        monkeypatch.setattr(query_aware_top_p, "_LARGE", (3, 4))


MAP_SIZES = ("small", "medium", "large")


def take_for(map_size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have maps taken for small ones, medium ones or large ones."""
    monkeypatch.setattr(query_aware_top_p, "SMALL_MAP", 2**14 if map_size == "small" else 0)
    monkeypatch.setattr(query_aware_top_p, "MEDIUM_MAP", 2**20 if map_size == "medium" else 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def float64(x: float) -> Tensor:
    return torch.full((), x, dtype=torch.float64, device=DEVICE)


def tokens_of(batch: int, q_len: int, kv_len: int, padded: bool) -> Tokens:
    mask = (torch.rand(batch, kv_len, generator=torch.Generator().manual_seed(2)) < 0.7).to(DEVICE) if padded else None
    return token_validity(q_len, kv_len, None, mask, torch.empty(batch, 1, kv_len, 16, device=DEVICE))


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

    if not padded:
        means = block_means(key, tokens.key_valid, block_size)
        edges = packed_edges(tokens, block_size, window)
        sees = (blocks_seen_by_rows(rows.position, tokens, block_size, window) & rows.taken.unsqueeze(-1)).any(-2)
        mean_row = take_rows(query, rows).float().sum(2, keepdim=True) / rows.taken.sum()
        torch.testing.assert_close(
            estimated_scores(inputs, means, packed, edges.last_valid_key, block_size),
            torch.where(sees[:, None], (mean_row @ means.repeat_interleave(heads // kv_heads, 1).mT).squeeze(2), float("-inf")),
            atol=1e-4,
            rtol=1e-4,
        )


@pytest.mark.parametrize("blocks", [1, 40, 300])
@pytest.mark.parametrize(("gamma", "floor", "cap"), [(0.6, 0, None), (0.9, 5, None), (0.9, 0, 3), (1.0, 0, None), (1.0, 2, 7)])
def test_pattern_and_lines(blocks, gamma, floor, cap):
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
    chosen = pattern_and_lines(
        torch.where(sees[:, None], estimate, float("-inf")), values[0], rows, count,
        torch.where(candidates.unsqueeze(2), lines, -1.0), float64(gamma), tau,
        FlexPrefillConfig(block_size=16, min_budget=16 * floor, max_budget=None if cap is None else 16 * cap),
        AttentionInputs(lines, lines, None, 0.7, 4.0),
    )  # fmt: skip

    scores = 4.0 * torch.tanh(0.7 * estimate / 4.0) + count.log()[:, None]
    estimated = torch.where(sees[:, None], masked_softmax(scores, sees[:, None]), 0.0)
    distance = jensen_shannon_distance(estimated, values[0])
    torch.testing.assert_close(chosen.distance, distance, atol=1e-5, rtol=1e-5)
    assert torch.equal(chosen.is_query_aware, distance.double() < tau)
    available = candidates.sum(-1, keepdim=True)
    number = available if gamma == 1 else top_p_count(values, candidates.unsqueeze(2), float64(gamma))
    number = number.clamp(max=blocks if cap is None else cap)
    number = torch.where(chosen.is_query_aware, 0, number).maximum(available.clamp(max=floor))
    assert torch.equal(chosen.number, number)
    assert torch.equal(chosen.kept.bool(), ranks(lines, candidates.unsqueeze(2)) < number.unsqueeze(-1))


@pytest.mark.parametrize(("length", "block_size", "head_dim"), [(100, 16, 24), (97, 48, 64), (256, 128, 32), (1, 64, 16)])
def test_means_of_wanted_heads(length, block_size, head_dim):
    x = normal(2, 3, head_dim, length).transpose(-1, -2)
    everything = torch.ones(1, length, dtype=torch.bool, device=DEVICE)
    torch.testing.assert_close(pooling_kernel.block_means(x, None, None, block_size), block_means(x, everything, block_size))
    valid = normal(2, length, seed=1) < 0.5
    x = torch.where(valid[:, None, :, None], x, float("nan"))
    wanted = torch.tensor([[True, False, True], [True, True, True]], device=DEVICE)
    got = pooling_kernel.block_means(x, valid, wanted, block_size)
    torch.testing.assert_close(got[wanted], block_means(x, valid, block_size)[wanted])


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window", "padded"),
    [(1, 1, None, False), (100, 100, None, False), (90, 150, 60, True)],
)
@pytest.mark.parametrize("gamma", [0.3, 0.95])
@pytest.mark.parametrize("map_size", MAP_SIZES)
def test_pooled_map_and_what_covers_it(q_len, kv_len, window, padded, gamma, map_size, monkeypatch):
    take_for(map_size, monkeypatch)
    size, heads, head_dim = 16, 4, 32
    tokens = tokens_of(2, q_len, kv_len, padded)
    edges, seen = packed_edges(tokens, size, window), block_visibility(tokens, size, window)
    query_means = normal(2, heads, -(-q_len // size), head_dim)
    key_means = normal(2, 2, -(-kv_len // size), head_dim, seed=1)
    active = torch.tensor([[True, True, False, True], [True, False, True, True]], device=DEVICE)
    count = valid_keys(tokens, size).expand(2, -1)
    scores = pooled_scores(query_means, key_means, count, 0.5, 6.0)
    visible = seen.visible.expand(2, -1, -1)[:, None].expand_as(scores)
    plain = masked_softmax(scores, visible)
    written = active[..., None, None] & visible
    values = plain
    # neither the map nor its rows are taken by their size: once is enough
    if map_size == MAP_SIZES[0]:
        inputs = AttentionInputs(query_means, torch.empty(2, 2, kv_len, 0), None, 0.5, 6.0, window)
        values = pooled_map(query_means, key_means, active, edges, inputs, size)
        torch.testing.assert_close(values[written], plain[written], atol=1e-6, rtol=1e-5)

    share = float64(gamma)
    values = torch.where(visible, values, -1.0)
    values[0, 1] = torch.where(visible[0, 1], 0.25, -1.0)  # nothing but ties
    values[1, 2] = torch.where(visible[1, 2], values[1, 2].round(decimals=1), -1.0)  # many ties, zeros among them
    pairs = [(top_p_map(values, active, edges, share, size), top_p(values.flatten(2), visible.flatten(2), share))]
    if map_size == MAP_SIZES[0]:
        pairs += [
            (top_p_rows(values, active, edges, share, None, size), top_p(values, visible, share)),
            (top_p_rows(values, active, edges, float64(1.0), 2, size), (ranks(values, visible) < 2) & visible),
        ]
    for got, expected in pairs:
        assert torch.equal((got != 0) & written, expected.view_as(values) & written)


@pytest.mark.parametrize(("q_blocks", "kv_blocks"), [(33, 65), pytest.param(70, 70, marks=pytest.mark.slow), (9, 300)])
def test_maps_of_all_sizes_are_covered_alike(q_blocks, kv_blocks, monkeypatch):
    size, heads = 16, 3
    tokens = tokens_of(1, q_blocks * size - 3, kv_blocks * size - 3, False)
    edges, visible = packed_edges(tokens, size, None), block_visibility(tokens, size, None).visible
    # of all magnitudes, so that every digit decides somewhere; in one head values of which many are equal
    values = (10 * normal(1, heads, q_blocks, kv_blocks)).where(visible, float("-inf")).softmax(-1)
    values[:, 2] = values[:, 2].round(decimals=2)
    active = torch.tensor([[True, False, True]], device=DEVICE)
    for gamma in (0.05, 0.6, 0.99):
        chosen = []
        for map_size in MAP_SIZES:
            take_for(map_size, monkeypatch)
            chosen.append((top_p_map(values, active, edges, float64(gamma), size) != 0) & visible & active[..., None, None])
        assert torch.equal(chosen[0], chosen[1])
        assert torch.equal(chosen[0], chosen[2])
        assert chosen[0].any()


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window", "padded"),
    [(1, 1, None, False), (90, 150, 60, True), (100, 2300, None, False), (70, 70, 20, False)],
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
    *lists, keep = lists_kernel.block_lists(kept, blocks, edges, inputs, size, True)
    expected = extended_lines(lines[0], lines[1], seen) | blocks_kept_always(seen)[:, None]
    if with_chosen:
        expected = expected | (chosen & active[..., None, None])
    expected = expected & seen.visible[:, None]
    assert torch.equal(keep, expected)
    for got, plain in zip(lists, block_lists(expected, seen.full), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, plain)
