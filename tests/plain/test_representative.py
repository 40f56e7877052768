"""Representative rows, their attention, and its sums by key block and block diagonal."""

import math

import pytest
import torch
from hypothesis import given, settings

from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import representative_rows
from flexmask.base.visibility import token_validity
from flexmask.plain.representative import representative_attention, take_rows
from flexmask.plain.vertical_slash import line_mass, row_mass
from tests.cases import cases
from tests.expected import visible_pairs

SIZE = 16


def tokens_of(q_len, kv_len, offset=None, attention_mask=None):
    return token_validity(q_len, kv_len, offset, attention_mask, torch.zeros(1, 1, kv_len, 16))


def taken_rows(rows):
    return [index[taken].tolist() for index, taken in zip(rows.row, rows.taken, strict=True)]


@pytest.mark.parametrize(
    ("q_len", "last", "middle"),
    [
        (40, range(24, 40), range(12, 28)),
        (41, range(25, 41), range(12, 28)),
        (16, range(16), range(16)),
        (5, range(5), range(5)),
        (1, range(1), range(1)),
    ],
)
def test_last_and_middle_rows(q_len, last, middle):
    tokens = tokens_of(q_len, 50)
    rows = representative_rows("last", tokens, SIZE)
    assert taken_rows(rows) == [list(last)]
    assert rows.position[rows.taken].tolist() == [50 - q_len + row for row in last]
    assert taken_rows(representative_rows("middle", tokens, SIZE)) == [list(middle)]


def test_rows_are_valid_ones_adjacent_or_not():
    attention_mask = torch.ones(4, 60, dtype=torch.int64)
    attention_mask[0, 40:] = 0  # right padding
    attention_mask[1, ::2] = 0  # every other token
    attention_mask[2, 20:] = 0  # fewer than a block
    attention_mask[3] = 0
    tokens = tokens_of(50, 60, attention_mask=attention_mask)
    last = representative_rows("last", tokens, SIZE)
    odd = list(range(1, 50, 2))
    assert taken_rows(last) == [list(range(14, 30)), odd[-SIZE:], list(range(10)), []]
    assert taken_rows(representative_rows("middle", tokens, SIZE)) == [list(range(7, 23)), odd[4:20], list(range(10)), []]
    assert ((last.row >= 0) & (last.row < 50)).all()


def test_slots_that_are_not_taken_are_zero():
    query = torch.full((1, 2, 5, 16), float("nan"))
    query[:, :, :3] = 1.0
    tokens = tokens_of(5, 5, attention_mask=torch.tensor([[1, 1, 1, 0, 0]]))
    taken = take_rows(query, representative_rows("last", tokens, SIZE))
    assert taken.shape == (1, 2, SIZE, 16)
    assert taken.sum(-1)[0, 0].tolist() == [16.0] * 3 + [0.0] * 13


def literal_sums(case, rows):
    """V and S by their definitions in float64."""
    size, softcap = case.config.block_size, case.scores.get("softcap")
    groups = case.query.shape[1] // case.key.shape[1]
    scale = case.scores.get("scale") or case.query.shape[3] ** -0.5
    scores = case.query.double() @ case.key.repeat_interleave(groups, 1).double().transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    blocks = math.ceil(case.key.shape[2] / size)
    vertical = torch.zeros(*case.query.shape[:2], blocks, dtype=torch.float64)
    slash = torch.zeros_like(vertical)
    pairs = visible_pairs(case)
    for b, (index, taken, position) in enumerate(zip(rows.row, rows.taken, rows.position, strict=True)):
        for row, place in zip(index[taken].tolist(), position[taken].tolist(), strict=True):
            keys = pairs[b, row].nonzero().flatten()
            share = scores[b, :, row, keys].softmax(-1) / int(taken.sum())
            vertical[b].index_add_(-1, keys // size, share)
            offset = place - keys
            for diagonal in range(blocks):
                slash[b, :, diagonal] += (share * (1 - (offset - diagonal * size).abs() / size).clamp(min=0)).sum(-1)
    return vertical, slash


@settings(max_examples=40)
@given(cases())
def test_sums_are_those_of_the_definition(case):
    size = case.config.block_size
    batch, _, q_len, head_dim = case.query.shape
    kv_len = case.key.shape[2]
    offset = torch.tensor(case.q_offset) if isinstance(case.q_offset, int) else case.q_offset
    tokens = token_validity(q_len, kv_len, offset, case.attention_mask, case.key)
    rows = representative_rows(case.config.options["index_queries"], tokens, size)
    scores = (case.scores.get("scale", head_dim**-0.5), case.scores.get("softcap"), case.scores.get("window"))
    attention = representative_attention(AttentionInputs(case.query, case.key, None, *scores), rows, tokens)
    pooled = line_mass(row_mass(attention, rows, size), rows, size)
    rows = type(rows)(*(x.expand(batch, -1) for x in rows))
    vertical, slash = literal_sums(case, rows)
    torch.testing.assert_close(pooled.vertical.double(), vertical, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(pooled.slash.double(), slash, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(pooled.vertical.sum(-1), rows.taken.any(-1)[:, None].float().expand(pooled.vertical.shape[:2]))
    assert not pooled.by_row.masked_select(~rows.taken[:, None, :, None]).any()
