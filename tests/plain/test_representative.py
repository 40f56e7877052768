"""Sums of the representative attention by key block and block diagonal."""

import math

import torch
from hypothesis import given, settings

from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import representative_rows
from flexmask.base.visibility import token_validity
from flexmask.plain.representative import representative_attention
from flexmask.plain.vertical_slash import line_mass, row_mass
from tests.cases import cases
from tests.expected import visible_pairs


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
