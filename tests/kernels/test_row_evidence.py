"""The blocks of each query block's own rows by the kernel, against the plain steps."""

from __future__ import annotations

import pytest
import torch

from flexmask.base.inputs import attention_inputs
from flexmask.base.visibility import block_visibility, token_validity, valid_keys
from flexmask.config import FlexPrefillConfig
from flexmask.plain.hybrid import reaches
from flexmask.plain.pooling import block_means
from flexmask.plain.row_evidence import row_evidence
from tests.kernels.support import HALF, LAYOUTS, by_head, in_layout, normal, tokens_of

pytest.importorskip("triton")

from flexmask.base.hybrid_rule import ROWS
from flexmask.kernels.pooling import block_means as kernel_means
from flexmask.kernels.pooling import split_means
from flexmask.kernels.row_evidence import row_blocks, row_coverage
from flexmask.kernels.visibility import packed_edges


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_halves_of_the_means_hold_twice_the_digits(dtype):
    key = normal(2, 3, 500, 64).to(dtype)
    means = kernel_means(key, None, None, 16)
    high, low = split_means(key, None, 16)
    assert high.dtype == low.dtype == dtype
    digits = 16 if dtype == torch.bfloat16 else 20
    error = (high.double() + low.double() - means.double()).abs()
    assert (error <= means.abs().double() * 2.0**-digits + 2.0**-24).all()
    assert (error < (high.double() - means.double()).abs())[low != 0].all()


def compare(query, key, config, gammas, padded=False, **scores):
    """Blocks and coverage of the kernel and of the plain steps; evidence within rounding of its threshold may fall either way."""
    inputs = attention_inputs(query, key, **scores).placed()
    if isinstance(padded, bool):
        tokens = tokens_of(query.shape[0], query.shape[2], key.shape[2], padded)
    else:
        tokens = token_validity(query.shape[2], key.shape[2], None, padded, key)
    edges = packed_edges(tokens, config.block_size, inputs.window)
    key_valid = None if tokens.filled else tokens.key_valid
    means, halves = block_means(key, key_valid, config.block_size), split_means(key, key_valid, config.block_size)
    gamma = by_head(gammas, query.shape[1])
    counts = valid_keys(tokens, config.block_size)
    plain = row_evidence(inputs, means, counts, tokens, config.block_size, config.row_stride)

    visible = block_visibility(tokens, config.block_size, inputs.window).visible[:, None]
    found = row_blocks(inputs, halves, tokens, edges, gamma, config) != 0
    threshold = (ROWS * (1 - gamma)).reshape(-1, 1, 1)
    clear = ((plain.root_mean_square - threshold).abs() > 1e-4 * threshold) & visible
    expected = reaches(plain.root_mean_square, ROWS, gamma)
    assert torch.equal(found[clear], expected[clear])
    assert clear.float().sum() > 0.9 * visible.expand_as(clear).sum()
    assert (expected & visible).any() and (~expected & visible).any()

    keep = expected & visible
    held = row_coverage(inputs, halves, tokens, edges, keep, config)
    asked = (plain.mean.sum(-1) > 0).sum(-1)
    torch.testing.assert_close(held, (plain.mean * keep).sum((-2, -1)) / asked, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("heads", "stride"), [((2, 2), 4), ((6, 2), 16), ((8, 1), 1)], ids=str)
@pytest.mark.parametrize(
    ("scores", "padded"), [({}, False), ({"window": 60, "softcap": 4.0}, True)], ids=["plain", "window, soft cap, padding"]
)
def test_equals_the_plain_steps(heads, stride, scores, padded):
    query, key = 3 * normal(2, heads[0], 150, 32), normal(2, heads[1], 150, 32, seed=1)
    config = FlexPrefillConfig(block_size=16, row_stride=stride, selection="hybrid")
    compare(query, key, config, [0.3 + 0.6 * head / heads[0] for head in range(heads[0])], padded, **scores)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    query, key = in_layout(layout, 2, 4, 100, 32), in_layout(layout, 2, 2, 100, 32, seed=1)
    config = FlexPrefillConfig(block_size=16, selection="hybrid")
    # sharp by the scale: a product of the query would be contiguous
    compare(query, key, config, [0.05, 0.2, 0.4, 0.6], scale=3 * 32**-0.5)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision(dtype):
    query, key = (3 * normal(1, 4, 130, 64)).to(dtype), normal(1, 2, 130, 64, seed=1).to(dtype)
    compare(query, key, FlexPrefillConfig(block_size=16, selection="hybrid", row_stride=4), [0.5, 0.6, 0.7, 0.8])


@pytest.mark.parametrize(
    ("heads", "lengths", "dtype", "scores"),
    [
        pytest.param((2, 2), (700, 700), torch.float32, {}, marks=pytest.mark.slow),  # the next has such tiles too
        ((6, 2), (650, 700), torch.float32, {"window": 640, "softcap": 4.0}),
        ((6, 2), (700, 704), torch.float16, {}),
    ],
    ids=["whole", "window, soft cap, chunk", "half precision"],
)
def test_tiles_that_every_row_sees_whole(heads, lengths, dtype, scores):
    # from 33 key blocks on there are tiles far from every edge
    query, key = (3 * normal(1, heads[0], lengths[0], 32)).to(dtype), normal(1, heads[1], lengths[1], 32, seed=1).to(dtype)
    config = FlexPrefillConfig(block_size=16, row_stride=4, selection="hybrid")
    compare(query, key, config, [0.5 + 0.4 * head / heads[0] for head in range(heads[0])], **scores)


def test_padding_in_tiles_far_from_every_edge():
    """Behind it every row is a token, and sees a tile of key blocks that are not whole."""
    query, key = 3 * normal(1, 2, 640, 32), normal(1, 2, 700, 32, seed=1)
    slot = torch.arange(700, device=key.device)
    padding = ((slot >= 45) & (slot // 4 % 3 != 0)) | (slot >= 60)
    config = FlexPrefillConfig(block_size=16, row_stride=4, selection="hybrid")
    compare(query, key, config, [0.6, 0.8], padded=padding[None])
