"""Numbers of visible key blocks against the written-out map."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmask import plain
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import attention_inputs
from tests.expected import by_block, seen_pairs


@settings(max_examples=100)
@given(st.data())
def test_blocks_seen(data):
    kv_len = data.draw(st.integers(1, 200))
    q_len = data.draw(st.integers(1, kv_len))
    batch = data.draw(st.integers(1, 3))
    offsets = torch.tensor(data.draw(st.lists(st.integers(0, kv_len - q_len), min_size=batch, max_size=batch)))
    offsets = data.draw(st.sampled_from([offsets, None]))
    is_token = torch.rand(batch, kv_len, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))) < 0.9
    is_token = data.draw(st.sampled_from([is_token, None]))
    window = data.draw(st.none() | st.integers(1, kv_len + 5))
    block_size = data.draw(st.sampled_from([16, 48, 64]))
    query, key = torch.zeros(batch, 1, q_len, 16), torch.zeros(batch, 1, kv_len, 16)
    inputs = attention_inputs(query, key, window=window, attention_mask=is_token, q_offset=offsets).with_offset()
    number, most = cut_into_blocks(inputs, block_size, plain).blocks_seen()
    where = torch.full((batch,), kv_len - q_len) if offsets is None else offsets
    tokens = torch.ones(batch, kv_len, dtype=torch.bool) if is_token is None else is_token
    expected = by_block(seen_pairs(q_len, where, tokens, window), block_size).sum(-1)
    assert torch.equal(number.expand(batch, -1), expected)
    assert torch.equal(most.expand(batch, -1), expected.amax(-1, keepdim=True))


@pytest.mark.parametrize("seen", [0, 1])
def test_padding_alone_is_seen_by_none(seen):
    is_token = torch.zeros(1, 64, dtype=torch.bool)
    is_token[:, 64 - seen :] = True
    query = torch.zeros(1, 1, 64, 16)
    number, most = cut_into_blocks(attention_inputs(query, query, attention_mask=is_token), 16, plain).blocks_seen()
    assert number.tolist() == [[0, 0, 0, seen]] and most.tolist() == [[seen]]
