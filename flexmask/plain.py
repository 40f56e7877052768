"""The steps that methods share, in PyTorch; `flexmask.kernels` has the same names.

Block means and the attention between them (FlexPrefill's avgpool), and lines: their mass, by key block and by block diagonal, and
the blocks on the kept ones (FlexPrefill, section 3.3). Steps are numbered as in docs/algorithm.md.

docs/algorithm.md defines the pooled sums V, by key block, and S, by block diagonal. Inside key block j, a row at phase ``r`` of
its block P and a key at phase ``y`` give shares ``1 - |r - y|/B``, ``max(0, r - y)/B`` and ``max(0, y - r)/B`` to diagonals
P-j, P-j+1 and P-j-1: S is three weighted sums by (row, key block), shifted by P.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.inputs import AttentionInputs
from flexmask.base.scores import block_means, capped, grouped_scores, masked_softmax
from flexmask.base.selection import BlockLists, ChosenBlocks, block_lists
from flexmask.base.visibility import BlockVisibility, TokenValidity, by_distance, split_into_blocks, visible_keys


def key_means(problem: BlockProblem) -> Tensor:
    """Mean of each key block's valid keys, (batch, num_kv_heads, num_kv_blocks, head_dim) float32."""
    tokens = problem.tokens
    return block_means(problem.inputs.key, None if tokens.known_all_valid else tokens.key_valid, problem.block_size)


def pooled_scores(query_means: Tensor, key_means: Tensor, key_counts: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scores of pooled queries with pooled keys, (batch, num_heads, rows, num_kv_blocks), -inf for blocks without valid keys."""
    # the logarithm lets a short or padded block weigh as much as its keys
    scores = capped(grouped_scores(query_means * scale, key_means), softcap)
    return scores + key_counts.float().log()[:, None, None, :]


def pooled_map(problem: BlockProblem, key_means: Tensor, key_counts: Tensor) -> Tensor:
    """Attention of each query block's mean to the key blocks it sees, shaped as the map of blocks."""
    inputs = problem.inputs
    scores = pooled_scores(problem.query_means(), key_means, key_counts, inputs.scale, inputs.softcap)
    return torch.where(problem.visible, masked_softmax(scores, problem.visible), 0.0)


class RepresentativeRows(NamedTuple):
    """Up to block_size query rows; batch is 1 where all batch rows agree."""

    row: Tensor  # (batch or 1, block_size) int64; 0 where not valid
    valid: Tensor  # (batch or 1, block_size) bool; False past the number of valid rows
    position: Tensor  # (batch or 1, block_size) int64


def representative_rows(subset: str, tokens: TokenValidity, block_size: int) -> RepresentativeRows:
    """The last (or the middle) block_size valid query rows, adjacent or not; fewer if there are no more."""
    slot = torch.arange(block_size, device=tokens.offset.device)
    # Inductor (2.11, CUDA) cannot search in a cumsum of ones, which it folds
    rank = tokens.row_valid.cumsum(-1) if tokens.has_attention_mask else None  # (batch, q_len)
    num_valid = torch.full_like(tokens.offset, tokens.row_valid.shape[1]) if rank is None else rank[:, -1]
    first = (num_valid - block_size).clamp(min=0)
    if subset == "middle":
        first = first // 2
    ordinal = first.unsqueeze(-1) + slot
    valid = ordinal < num_valid.unsqueeze(-1)
    row = torch.where(valid, ordinal if rank is None else torch.searchsorted(rank, ordinal + 1), 0)
    return RepresentativeRows(row, valid, tokens.offset.unsqueeze(-1) + row)


class LineMass(NamedTuple):
    """The pooled representative attention; V and S are means over the valid rows."""

    vertical: Tensor  # V, (batch, num_heads, num_kv_blocks) float32
    slash: Tensor  # S, the same shape
    by_row: Tensor  # (batch, num_heads, block_size, num_kv_blocks) float32, by key block; 0 in rows not valid


def line_mass(attention: Tensor, rows: RepresentativeRows, block_size: int) -> LineMass:
    """Pool the representative attention."""
    attention = split_into_blocks(attention, block_size, 3)
    row_phase = (rows.position % block_size).unsqueeze(-1)
    # a quotient of integers has the default dtype
    lead = (row_phase - torch.arange(block_size, device=attention.device)).float() / block_size
    weights = torch.stack([torch.ones_like(lead), lead.clamp(min=0), (-lead).clamp(min=0)], -1)
    weights = torch.where(rows.valid[..., None, None], weights, 0.0)
    # to key block j, and the parts of it on block diagonals P-j+1 and P-j-1; the rest is on P-j
    if attention.device.type == "cpu":
        by_row, after, before = (attention @ weights[:, None]).unbind(-1)
    else:
        # products may run in TF32; torch compiles these sums into one kernel
        by_row, after, before = ((attention * weight[:, None, :, None]).sum(-1) for weight in weights.unbind(-1))
    own_block = (rows.position // block_size)[:, None]
    slash = by_distance(by_row - after - before, own_block).sum(2)
    slash = slash + by_distance(after, own_block + 1).sum(2) + by_distance(before, own_block - 1).sum(2)
    number = rows.valid.sum(-1).clamp(min=1)[:, None, None]
    return LineMass(by_row.sum(2) / number, slash / number, by_row)


def blocks_on_lines(vertical: Tensor, slash: Tensor, visibility: BlockVisibility) -> Tensor:
    """The map of all blocks on kept key blocks and block diagonals, (batch, num_heads, num_kv_blocks) bool each."""
    by_q_block = slash.unsqueeze(-2).expand(-1, -1, visibility.first_row_block.shape[-1], -1)
    # a query block whose rows have positions in two key blocks lies on two diagonals
    first, last = (by_distance(by_q_block, block[:, None]) for block in (visibility.first_row_block, visibility.last_row_block))
    return vertical.unsqueeze(-2) | first | last


def blocks_kept_always(problem: BlockProblem) -> Tensor:
    """First visible key block and the diagonal blocks of every query block, shaped as `BlockProblem.visible`."""
    first = problem.visible.int().argmax(-1, keepdim=True)
    return problem.visible & ((problem.kv_block == first) | problem.diagonal_blocks)


def take_rows(query: Tensor, rows: RepresentativeRows) -> Tensor:
    """The representative rows of query, (batch, num_heads, block_size, head_dim); zero where not valid."""
    batch, num_heads, _, head_dim = query.shape
    index = rows.row[:, None, :, None].expand(batch, num_heads, -1, head_dim)
    return query.gather(2, index).masked_fill(~rows.valid[:, None, :, None], 0)


def representative_attention(inputs: AttentionInputs, rows: RepresentativeRows, tokens: TokenValidity) -> Tensor:
    """Softmax attention of the representative rows, (batch, num_heads, block_size, kv_len) float32; arbitrary where not valid."""
    visible = visible_keys(rows.position, rows.valid, tokens, inputs.window)
    query = take_rows(inputs.query, rows).float() * inputs.scale
    return masked_softmax(capped(grouped_scores(query, inputs.key), inputs.softcap), visible[:, None])


class RepresentativeMass(NamedTuple):
    rows: RepresentativeRows
    attention: Tensor  # (batch, num_heads, block_size, kv_len) float32
    lines: LineMass  # by key block (V) and by block diagonal (S)


def representative_mass(problem: BlockProblem, subset: str, with_diagonals: bool = True) -> RepresentativeMass:
    """Step 1: the attention of the "last" or the "middle" rows, and its mass by line; S is computed in any case."""
    rows = representative_rows(subset, problem.tokens, problem.block_size)
    attention = representative_attention(problem.inputs, rows, problem.tokens)
    return RepresentativeMass(rows, attention, line_mass(attention, rows, problem.block_size))


def coverage(problem: BlockProblem, mass: RepresentativeMass, keep: Tensor) -> Tensor:
    """True attention of the representative rows that the kept blocks of their query blocks hold, (batch, num_heads) float32."""
    rows = mass.rows
    q_block = (rows.row // problem.block_size)[:, None, :, None].expand(*keep.shape[:2], -1, keep.shape[3])
    in_kept = torch.where(keep.gather(2, q_block), mass.lines.by_row, 0.0).sum((-2, -1))
    return in_kept / rows.valid.sum(-1).clamp(min=1)[:, None]


def kept_blocks(
    problem: BlockProblem,
    kept_lines: Tensor,
    blocks: ChosenBlocks | None,
    nearest: int = 0,
    dense_rows: RepresentativeRows | None = None,
) -> tuple[BlockLists, Tensor]:
    """Steps 4 and 5: the lists of the kept lines and `blocks` with the blocks kept always, and the map of kept blocks.

    `kept_lines` are key blocks, and block diagonals if there are two. Every query block keeps its `nearest` nearest blocks; query
    blocks with rows of `dense_rows` keep every block that they see.
    """
    if kept_lines.shape[0] == 1:
        keep = kept_lines[0].unsqueeze(-2)
    else:
        keep = blocks_on_lines(kept_lines[0], kept_lines[1], problem.visibility)
    keep = keep | blocks_kept_always(problem) | problem.nearest_diagonals(nearest)
    if blocks is not None:
        keep = keep | blocks.chosen
    if dense_rows is not None:
        q_block = torch.arange(keep.shape[2], device=keep.device)
        is_in = ((dense_rows.row // problem.block_size).unsqueeze(1) == q_block.unsqueeze(-1)) & dense_rows.valid.unsqueeze(1)
        keep = keep | is_in.any(-1)[:, None, :, None]
    keep = keep & problem.visible
    return block_lists(keep, problem.visibility.full), keep
