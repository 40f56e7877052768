"""Block means and the scores between them."""

import math

import pytest
import torch

from flexmask.base.scores import grouped_scores, masked_softmax
from flexmask.plain.pooling import block_means, pooled_scores


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 31, 32, 63])
def test_means_are_over_valid_tokens(length):
    x = random(2, 3, length, 16)
    valid = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.5
    valid[0, :16] = False
    means = block_means(x, valid, 16)
    assert means.shape == (2, 3, math.ceil(length / 16), 16)
    for b in range(2):
        for j in range(means.shape[2]):
            block = slice(16 * j, 16 * j + 16)
            tokens = x[b, :, block][:, valid[b, block]].double()
            expected = tokens.mean(1) if tokens.shape[1] else torch.zeros(3, 16).double()
            torch.testing.assert_close(means[b, :, j].double(), expected, atol=1e-6, rtol=1e-6)


def test_invalid_tokens_do_not_matter():
    x = random(1, 2, 40, 16)
    valid = torch.arange(40)[None] % 3 != 0
    means = block_means(x, valid, 16)
    x[:, :, ::3] = float("nan")
    assert torch.equal(block_means(x, valid, 16), means)
    x[:, :, ::3] = float("inf")
    assert torch.equal(block_means(x, valid, 16), means)


@pytest.mark.parametrize("length", [1, 16, 63])
def test_no_validity_is_all_valid(length):
    x = random(2, 3, length, 16)
    assert torch.equal(block_means(x, None, 16), block_means(x, torch.ones(1, length).bool(), 16))


def test_one_validity_row_serves_the_whole_batch():
    x, valid = random(3, 2, 40, 16), torch.arange(40)[None] < 30
    assert torch.equal(block_means(x, valid, 16), block_means(x, valid.expand(3, -1), 16))


@pytest.mark.parametrize("num_heads", [2, 6])
def test_scores_of_a_group_are_with_its_key_head(num_heads):
    query, key = random(2, num_heads, 5, 16), random(2, 2, 7, 16, seed=1)
    scores = grouped_scores(query, key)
    for h in range(num_heads):
        expected = query[:, h].double() @ key[:, h * 2 // num_heads].double().transpose(1, 2)
        torch.testing.assert_close(scores[:, h].double(), expected, atol=1e-5, rtol=1e-5)


def test_pooled_scores_weigh_a_block_by_its_keys():
    query, key = random(1, 2, 3, 16), random(1, 2, 4, 16, seed=1)
    scores = pooled_scores(query, key, torch.tensor([[16, 1, 0, 3]]), 0.5, 2.0)
    expected = 2 * torch.tanh(query @ key.transpose(2, 3) / 4)
    for j, count in ((0, 16), (1, 1), (3, 3)):
        torch.testing.assert_close(scores[..., j], expected[..., j] + math.log(count))
    assert (scores[..., 2] == -math.inf).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 129), (4, 8, 1000), (1, 2, 128, 20000), (70, 1, 5)])
def test_softmax_over_its_own_memory_is_that_of_a_copy(shape):
    """Rows that see nothing or hold infinities or NaN, and other strides, included."""
    for strided in (False, True):
        scores = random(*shape, 2)[..., 0] if strided else random(*shape)
        visible = random(*shape, seed=1) < 0.5
        scores[..., :1, 0] = float("inf")
        scores[..., -1:, -1] = float("nan")
        visible[..., :1, 1:] = False
        expected = torch.where(visible, scores, torch.finfo(torch.float32).min).softmax(-1)
        got = masked_softmax(scores, visible)
        torch.testing.assert_close(got, expected, atol=0, rtol=0, equal_nan=True)
        assert got.data_ptr() == scores.data_ptr()
