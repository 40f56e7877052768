"""Visibility by token and by block, against every single pair."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmask.base.visibility import block_visibility, blocks_seen_by_rows, token_validity
from tests.expected import by_block, seen_pairs


def key_of_length(kv_len):
    return torch.zeros(1, 1, kv_len, 16)


def assert_exact(q_len, offsets, is_token, window, block_size):
    """Block visibility against the blocks of the written-out mask."""
    kv_len = is_token.shape[1]
    tokens = token_validity(q_len, kv_len, offsets, is_token, key_of_length(kv_len))
    seen = block_visibility(tokens, block_size, window)
    pairs = seen_pairs(q_len, offsets, is_token, window)
    assert torch.equal(seen.visible, by_block(pairs, block_size))
    assert torch.equal(seen.full, by_block(pairs, block_size, every=True))
    rows = torch.arange(q_len).repeat(len(offsets), 1)
    by_rows = blocks_seen_by_rows(offsets[:, None] + rows, tokens, block_size, window)
    blocks = by_block(pairs.flatten(0, 1).unsqueeze(-2), block_size).view(by_rows.shape)
    valid = tokens.row_valid
    assert torch.equal(by_rows[valid], blocks[valid])


@pytest.mark.parametrize("block_size", [2, 3])
@pytest.mark.parametrize("kv_len", [1, 2, 3, 4, 5, 6])
def test_blocks_of_every_padding_of_short_prompts(kv_len, block_size):
    paddings = torch.tensor(list(itertools.product([False, True], repeat=kv_len)))
    for q_len in range(1, kv_len + 1):
        for offset in range(kv_len - q_len + 1):
            for window in (None, *range(1, kv_len + 2), 2 * kv_len, 3 * kv_len):
                assert_exact(q_len, torch.full((len(paddings),), offset), paddings, window, block_size)


@settings(max_examples=60)
@given(st.data())
def test_blocks_of_longer_prompts(data):
    kv_len = data.draw(st.integers(1, 200))
    q_len = data.draw(st.integers(1, kv_len))
    offsets = torch.tensor(data.draw(st.lists(st.integers(0, kv_len - q_len), min_size=1, max_size=3)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    share = data.draw(st.sampled_from([0.0, 0.02, 0.5, 0.95, 1.0]))
    is_token = torch.rand(len(offsets), kv_len, generator=generator) < share
    window = data.draw(st.none() | st.integers(1, kv_len + 5) | st.integers(kv_len, 4 * kv_len))
    assert_exact(q_len, offsets, is_token, window, data.draw(st.sampled_from([16, 48, 64])))


def test_one_batch_row_stands_for_all_without_padding_or_offsets():
    tokens = token_validity(20, 50, None, None, key_of_length(50))
    assert tokens.key_valid.shape == (1, 50)
    assert tokens.row_valid.all()
    assert tokens.offset.tolist() == [30]
    seen = block_visibility(tokens, 16, None)
    assert seen.visible.tolist() == [[[True, True, True, False], [True] * 4]]
    assert seen.full.tolist() == [[[True, False, False, False], [True, True, False, False]]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_out_of_range_are_clamped(dtype):
    offsets = torch.tensor([-5, 3, 99], dtype=dtype)
    tokens = token_validity(6, 10, offsets, torch.ones(3, 10), key_of_length(10))
    assert tokens.offset.tolist() == [0, 3, 4]
    assert tokens.key_valid.sum(-1).tolist() == [6, 9, 10]


@pytest.mark.parametrize(("first", "last"), [(16, 16), (17, 32)])
def test_diagonals_are_the_key_blocks_of_first_and_last_row(first, last):
    tokens = token_validity(16, 64, torch.tensor([first]), None, key_of_length(64))
    seen = block_visibility(tokens, 16, None)
    assert seen.first_diagonal.tolist() == [[1]]
    assert seen.last_diagonal.tolist() == [[last // 16]]
