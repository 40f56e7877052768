"""Attention of the representative query rows to every key (the paper's A-hat), and its sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import RepresentativeRows, representative_rows
from flexmask.base.scores import capped, grouped_scores, masked_softmax
from flexmask.base.visibility import Tokens, visible_keys
from flexmask.plain.vertical_slash import LineMass, line_mass, row_mass


def take_rows(query: Tensor, rows: RepresentativeRows) -> Tensor:
    """The representative rows of query, (batch, num_heads, block_size, head_dim); zero where not taken."""
    batch, num_heads, _, head_dim = query.shape
    index = rows.row[:, None, :, None].expand(batch, num_heads, -1, head_dim)
    return query.gather(2, index).masked_fill(~rows.taken[:, None, :, None], 0)


def representative_attention(inputs: AttentionInputs, rows: RepresentativeRows, tokens: Tokens) -> Tensor:
    """Softmax attention of the representative rows, (batch, num_heads, block_size, kv_len) float32; arbitrary where not taken."""
    visible = visible_keys(rows.position, rows.taken, tokens, inputs.window)
    query = take_rows(inputs.query, rows).float() * inputs.scale
    return masked_softmax(capped(grouped_scores(query, inputs.key), inputs.softcap), visible[:, None])


class RepresentativeMass(NamedTuple):
    rows: RepresentativeRows
    attention: Tensor  # (batch, num_heads, block_size, kv_len) float32
    mass: LineMass  # by key block (V) and by block diagonal (S)


def representative_mass(problem: BlockProblem, which: str) -> RepresentativeMass:
    """Step 1: the attention of the "last" or the "middle" rows, and its mass by line."""
    rows = representative_rows(which, problem.tokens, problem.block_size)
    attention = representative_attention(problem.inputs, rows, problem.tokens)
    return RepresentativeMass(rows, attention, line_mass(row_mass(attention, rows, problem.block_size), rows, problem.block_size))


def coverage(problem: BlockProblem, mass: RepresentativeMass, keep: Tensor) -> Tensor:
    """True attention of the representative rows that the kept blocks of their query blocks hold, (batch, num_heads) float32."""
    rows = mass.rows
    q_block = (rows.row // problem.block_size)[:, None, :, None].expand(*keep.shape[:2], -1, keep.shape[3])
    held = torch.where(keep.gather(2, q_block), mass.mass.by_row, 0.0).sum((-2, -1))
    return held / rows.taken.sum(-1).clamp(min=1)[:, None]
