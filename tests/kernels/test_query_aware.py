"""The pooled map and its top-p blocks by kernels against the plain steps."""

import pytest
import torch

from flexmask.base.inputs import AttentionInputs
from flexmask.base.scores import masked_softmax, ranks, top_p
from flexmask.base.visibility import block_visibility, valid_keys
from flexmask.plain.pooling import pooled_scores
from tests.kernels.support import DEVICE, by_head, geometry, normal, tokens_of

pytest.importorskip("triton")

from flexmask.kernels import query_aware_top_p
from flexmask.kernels.query_aware import pooled_map
from flexmask.kernels.query_aware_top_p import top_p_map, top_p_rows
from flexmask.kernels.visibility import edges_of


@pytest.fixture(autouse=True)
def _few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would take seconds for 64 chunks of rows per pass."""
    if DEVICE == "cpu":
        monkeypatch.setattr(query_aware_top_p, "_MEDIUM", (5, 4))
        monkeypatch.setattr(query_aware_top_p, "_LARGE", (3, 4))


MAP_SIZES = ("small", "medium", "large")


def take_for(map_size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have maps taken for small, medium or large ones."""
    monkeypatch.setattr(query_aware_top_p, "SMALL_MAP", 2**14 if map_size == "small" else 0)
    monkeypatch.setattr(query_aware_top_p, "MEDIUM_MAP", 2**20 if map_size == "medium" else 0)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window", "padded"),
    [(1, 1, None, False), (100, 100, None, False), (90, 150, 60, True)],
)
@pytest.mark.parametrize(
    "gamma", [*(pytest.param(gamma, marks=pytest.mark.slow) for gamma in (0.3, 0.95)), [0.9, 0.4, 0.6, 1.0]], ids=str
)
@pytest.mark.parametrize("map_size", MAP_SIZES)
def test_pooled_map_and_its_top_p(q_len, kv_len, window, padded, gamma, map_size, monkeypatch):
    take_for(map_size, monkeypatch)
    size, heads, head_dim = 16, 4, 32
    call = geometry(2, q_len, kv_len, padded, window)
    tokens = tokens_of(call)
    edges, seen = edges_of(call, size), block_visibility(tokens, size, window)
    query_means = normal(2, heads, -(-q_len // size), head_dim)
    key_means = normal(2, 2, -(-kv_len // size), head_dim, seed=1)
    active = torch.tensor([[True, True, False, True], [True, False, True, True]], device=DEVICE)
    count = valid_keys(tokens, size).expand(2, -1)
    scores = pooled_scores(query_means, key_means, count, 0.5, 6.0)
    visible = seen.visible.expand(2, -1, -1)[:, None].expand_as(scores)
    plain = masked_softmax(scores, visible)
    written = active[..., None, None] & visible
    values = plain
    # the kernels of map and rows do not depend on the map's size
    if map_size == MAP_SIZES[0]:
        inputs = AttentionInputs(query_means, torch.empty(2, 2, kv_len, 0), None, 0.5, 6.0, window)
        values = pooled_map(query_means, key_means, active, edges, inputs, size)
        torch.testing.assert_close(values[written], plain[written], atol=1e-6, rtol=1e-5)

    share = by_head(gamma, heads)
    values = torch.where(visible, values, -1.0)
    values[0, 1] = torch.where(visible[0, 1], 0.25, -1.0)  # nothing but ties
    values[1, 2] = torch.where(visible[1, 2], values[1, 2].round(decimals=1), -1.0)  # many ties, zeros among them
    pairs = [(top_p_map(values, active, edges, share, size), top_p(values.flatten(2), visible.flatten(2), share))]
    if map_size == MAP_SIZES[0]:
        pairs += [
            (top_p_rows(values, active, edges, share, None, size), top_p(values, visible, share.unsqueeze(-1))),
            (top_p_rows(values, active, edges, by_head(1.0, heads), 2, size), (ranks(values, visible) < 2) & visible),
        ]
    for got, expected in pairs:
        assert torch.equal((got != 0) & written, expected.view_as(values) & written)


@pytest.mark.parametrize("padded", [False, True])
def test_pooled_map_within_a_window(padded):
    size, q_len, kv_len = 16, 50, 203
    tokens, key_means = tokens_of(geometry(2, q_len, kv_len, padded)), normal(2, 2, 13, 16, seed=1)
    query_means, active = normal(2, 2, 4, 16), torch.ones(2, 2, dtype=torch.bool, device=DEVICE)
    visible_blocks = set()
    for window in range(94, 114):
        visible = block_visibility(tokens, size, window).visible.expand(2, -1, -1)[:, None].expand(2, 2, -1, -1)
        inputs = AttentionInputs(query_means, torch.empty(2, 2, kv_len, 0), None, 0.5, None, window)
        edges = edges_of(geometry(2, q_len, kv_len, padded, window), size)
        values = pooled_map(query_means, key_means, active, edges, inputs, size)
        plain = masked_softmax(pooled_scores(query_means, key_means, valid_keys(tokens, size).expand(2, -1), 0.5, None), visible)
        torch.testing.assert_close(values[visible], plain[visible], atol=1e-6, rtol=1e-5)
        visible_blocks.add(int(visible.sum()))
    assert len(visible_blocks) > 1


@pytest.mark.parametrize(
    ("q_blocks", "kv_blocks"),
    [
        *(pytest.param(*blocks, marks=pytest.mark.slow) for blocks in ((33, 65), (70, 70))),
        (9, 300),
        (12, 135),
    ],
)
# the last: a group of eight rows ends in another tile of 128 columns
def test_maps_of_all_sizes_give_the_same_blocks(q_blocks, kv_blocks, monkeypatch):
    size, heads = 16, 3
    call = geometry(1, q_blocks * size - 3, kv_blocks * size - 3)
    edges, visible = edges_of(call, size), block_visibility(tokens_of(call), size, None).visible
    # of all magnitudes; in one head many are equal
    scores = 10 * normal(1, heads, q_blocks, kv_blocks)
    scores[:, 0, :, 128:131] += 30  # most of the sum in the second tile of columns
    values = scores.where(visible, float("-inf")).softmax(-1)
    values[:, 2] = values[:, 2].round(decimals=2)
    active = torch.tensor([[True, False, True]], device=DEVICE)
    for gamma in (0.05, 0.6, 0.99, [0.3, 0.5, 1.0]):
        chosen = []
        for map_size in MAP_SIZES:
            take_for(map_size, monkeypatch)
            chosen.append(
                (top_p_map(values, active, edges, by_head(gamma, heads), size) != 0) & visible & active[..., None, None]
            )
        assert torch.equal(chosen[0], chosen[1])
        assert torch.equal(chosen[0], chosen[2])
        assert chosen[0].any()
