"""Hybrid selection in PyTorch, step by step: evidence from all query rows joined with FlexPrefill's last block of queries.

The representative rows alone miss what earlier rows attend to; all rows together hardly notice what only the last ones look for.
So each query block keeps the key blocks that its own rows attend to, and every head the heaviest lines of its representative
rows. Thresholds decide, not shares of a sum: where attention is diffuse, hardly a block is worth its time. The query blocks of
the representative rows keep more of the nearest blocks than others: what they drop, no later row makes up for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.candidate_lines import candidate_lines
from flexmask.base.hybrid_rule import DIAGONAL, KEY_BLOCK, NEAREST, ROWS
from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import RepresentativeRows, representative_rows
from flexmask.base.search_result import SearchResult
from flexmask.base.visibility import BlockVisibility, block_visibility, token_validity, valid_keys
from flexmask.config import FlexPrefillConfig
from flexmask.plain.block_lists import block_lists
from flexmask.plain.pooling import block_means
from flexmask.plain.representative import representative_attention
from flexmask.plain.row_evidence import row_evidence
from flexmask.plain.top_p import ranks
from flexmask.plain.vertical_slash import LineMass, blocks_kept_always, extended_lines, line_mass, row_mass


def search(
    inputs: AttentionInputs, config: FlexPrefillConfig, gamma: Tensor, tau: Tensor, with_stats: bool, with_keep: bool
) -> SearchResult:
    """Choose the blocks of every head; the arguments are those of `flexmask.plain.search.search`, tau has no part."""
    block_size, lengths = config.block_size, (inputs.query.shape[2], inputs.key.shape[2])
    # blocks are chosen by `tokens`; `seen` has those that do not decide as well
    tokens = seen_tokens = token_validity(*lengths, inputs.offset, inputs.deciding_tokens(), inputs.key)
    if inputs.deciding is not None:
        seen_tokens = token_validity(*lengths, inputs.offset, None, inputs.key)
    seen = block_visibility(seen_tokens, block_size, inputs.window)

    # the last rows: their attention by key block and by block diagonal (S), and the lines kept of it
    rows = representative_rows(config.index_queries, tokens, block_size)
    attention = representative_attention(inputs, rows, tokens)
    mass = line_mass(row_mass(attention, rows, block_size), rows, block_size)
    candidates = candidate_lines(tokens, block_size, inputs.window)
    vertical, slash = last_rows_lines(mass, rows, candidates, gamma, config)

    # all rows: their attention to the means of the key blocks, and the blocks kept of it
    key_means = block_means(inputs.key, None if tokens.filled else tokens.key_valid, block_size)
    evidence = row_evidence(inputs, key_means, valid_keys(tokens, block_size), tokens, block_size, config.row_stride)
    keep = extended_lines(vertical, slash, seen) | reaches(evidence.root_mean_square, ROWS, gamma)

    always = blocks_kept_always(seen) | nearest_of_last_rows(rows, seen, config)
    keep = (keep | always[:, None]) & seen.visible[:, None]
    stats = _statistics(keep, (vertical, slash), mass, rows, seen, evidence.mean, block_size) if with_stats else None
    return SearchResult(block_lists(keep, seen.full), keep, stats)


def reaches(values: Tensor, factor: float, gamma: Tensor) -> Tensor:
    """True where `values`, (batch, num_heads, ...), reach ``factor * (1 - gamma)``; NaN does, so that it drops nothing."""
    threshold = (factor * (1 - gamma)).float()
    return ~(values < threshold.reshape(-1, *[1] * (values.dim() - 2)))


def last_rows_lines(
    mass: LineMass, rows: RepresentativeRows, candidates: Tensor, gamma: Tensor, config: FlexPrefillConfig
) -> tuple[Tensor, Tensor]:
    """Key blocks and block diagonals that the representative rows keep, two (batch, num_heads, num_kv_blocks) bool.

    Key blocks to which one of the rows gives enough, and the heaviest by that measure for half of the floor; block diagonals to
    which they give enough on average, and the nearest for the other half. `candidates` is (2, batch or 1, num_kv_blocks) bool.
    """
    in_vertical, in_slash = candidates.unsqueeze(2).unbind(0)
    most = torch.where(rows.taken[:, None, :, None], mass.by_row, 0.0).amax(2)
    floor = config.half_of_min_blocks
    heaviest = ranks(most, in_vertical) < floor
    near = torch.arange(most.shape[-1], device=most.device) < floor
    vertical = heaviest | reaches(most, KEY_BLOCK, gamma)
    slash = near | reaches(mass.slash, DIAGONAL, gamma)
    return vertical & in_vertical, slash & in_slash


def nearest_of_last_rows(rows: RepresentativeRows, seen: BlockVisibility, config: FlexPrefillConfig) -> Tensor:
    """Nearest blocks of the query blocks that hold representative rows, (batch or 1, num_q_blocks, num_kv_blocks) bool.

    Those on the nearest ``NEAREST * min_blocks`` block diagonals; they need not be visible.
    """
    q_block, kv_block = (torch.arange(count, device=rows.row.device) for count in seen.visible.shape[1:])
    holds = ((rows.row // config.block_size).unsqueeze(1) == q_block.unsqueeze(-1)) & rows.taken.unsqueeze(1)
    # a block on two diagonals is near if the nearer of them is
    distance = seen.first_diagonal.unsqueeze(-1) - kv_block
    return holds.any(-1, keepdim=True) & (distance < NEAREST * config.min_blocks)


def _statistics(
    keep: Tensor,
    lines: tuple[Tensor, Tensor],
    mass: LineMass,
    rows: RepresentativeRows,
    seen: BlockVisibility,
    evidence: Tensor,
    block_size: int,
) -> tuple[Tensor, ...]:
    """The tensors of FlexPrefillStats but is_dense, in its order; seven arguments, one for each step that it reports on."""
    visible_blocks = seen.visible.sum((-2, -1)).clamp(min=1)[:, None]
    q_block = (rows.row // block_size)[:, None, :, None].expand(*keep.shape[:2], -1, keep.shape[3])
    held = torch.where(keep.gather(2, q_block), mass.by_row, 0.0).sum((-2, -1))
    with_evidence = (evidence.sum(-1) != 0).sum(-1)  # NaN, if there are none, or in the evidence
    return (
        torch.zeros(keep.shape[:2], dtype=torch.bool, device=keep.device),
        torch.full(keep.shape[:2], float("nan"), dtype=torch.float32, device=keep.device),
        keep.sum((-2, -1)).float() / visible_blocks,
        lines[0].sum(-1),
        lines[1].sum(-1),
        held / rows.taken.sum(-1).clamp(min=1)[:, None],
        torch.where(keep, evidence, 0.0).sum((-2, -1)) / with_evidence,
    )
