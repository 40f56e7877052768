"""Hybrid selection in PyTorch, step by step: evidence from all query rows joined with FlexPrefill's last block of queries.

The representative rows alone miss what earlier rows attend to; all rows together hardly notice what only the last ones look for.
So each query block keeps the key blocks that its own rows attend to, and every head the heaviest lines of its representative rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.candidate_lines import candidate_lines
from flexmask.base.hybrid_rule import slash_share
from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import RepresentativeRows, representative_rows
from flexmask.base.search_result import SearchResult
from flexmask.base.visibility import BlockVisibility, block_visibility, token_validity, valid_keys
from flexmask.config import FlexPrefillConfig
from flexmask.plain.block_lists import block_lists
from flexmask.plain.pooling import block_means
from flexmask.plain.representative import representative_attention
from flexmask.plain.row_evidence import row_evidence
from flexmask.plain.top_p import ranks, top_p
from flexmask.plain.vertical_slash import LineMass, blocks_kept_always, extended_lines, line_mass, row_mass


def search(
    inputs: AttentionInputs, config: FlexPrefillConfig, gamma: Tensor, tau: Tensor, with_stats: bool, with_keep: bool
) -> SearchResult:
    """Choose the blocks of every head; the arguments are those of `flexmask.plain.search.search`, tau has no part."""
    block_size = config.block_size
    tokens = token_validity(inputs.query.shape[2], inputs.key.shape[2], inputs.offset, inputs.attention_mask, inputs.key)
    seen = block_visibility(tokens, block_size, inputs.window)

    # the last rows: their attention by key block (V) and by block diagonal (S), and the lines kept of it
    rows = representative_rows(config.index_queries, tokens, block_size, inputs.deciding)
    attention = representative_attention(inputs, rows, tokens)
    mass = line_mass(row_mass(attention, rows, block_size), rows, block_size)
    candidates = candidate_lines(tokens, block_size, inputs.window)
    vertical, slash = last_rows_lines(mass, candidates, gamma, config)

    # all rows: their attention to block means, and top-p of it by query block
    key_means = block_means(inputs.key, None if tokens.filled else tokens.key_valid, block_size)
    evidence = row_evidence(inputs, key_means, valid_keys(tokens, block_size), tokens, block_size, config.row_stride)
    keep = extended_lines(vertical, slash, seen) | row_blocks(evidence, seen, gamma, config)

    keep = (keep | blocks_kept_always(seen)[:, None]) & seen.visible[:, None]
    stats = None
    if with_stats:
        stats = _statistics(keep, (vertical, slash), mass, rows, seen, evidence, block_size)
    return SearchResult(block_lists(keep, seen.full), keep, stats)


def last_rows_lines(mass: LineMass, candidates: Tensor, gamma: Tensor, config: FlexPrefillConfig) -> tuple[Tensor, Tensor]:
    """Key blocks and block diagonals that the representative rows keep, two (batch, num_heads, num_kv_blocks) bool.

    The heaviest key blocks up to the floor; the fewest block diagonals that hold the slash share, within the cap, and the nearest
    ones up to the floor, a window. `candidates` is (2, batch or 1, num_kv_blocks) bool, of `candidate_lines`.
    """
    in_vertical, in_slash = candidates.unsqueeze(2).unbind(0)
    vertical = (ranks(mass.vertical, in_vertical) < config.min_blocks) & in_vertical
    slash = top_p(mass.slash, in_slash, slash_share(gamma).reshape(-1, 1))
    if config.max_blocks is not None:
        slash = slash & (ranks(mass.slash, in_slash) < config.max_blocks)
    near = torch.arange(slash.shape[-1], device=slash.device) < config.min_blocks
    return vertical, slash | (near & in_slash)


def row_blocks(evidence: Tensor, seen: BlockVisibility, gamma: Tensor, config: FlexPrefillConfig) -> Tensor:
    """The fewest key blocks of every query block that hold gamma of its row evidence, within the cap; bool, as `evidence`."""
    visible, gamma = seen.visible[:, None], gamma.reshape(-1, 1, 1)
    keep = top_p(evidence, visible, gamma) | ((gamma >= 1) & visible)
    if config.max_blocks is not None:
        keep = keep & (ranks(evidence, keep) < config.max_blocks)
    return keep


def _statistics(
    keep: Tensor,
    lines: tuple[Tensor, Tensor],
    mass: LineMass,
    rows: RepresentativeRows,
    seen: BlockVisibility,
    evidence: Tensor,
    block_size: int,
) -> tuple[Tensor, ...]:
    """The tensors of FlexPrefillStats, in its order; seven arguments, one for each step that it reports on."""
    visible_blocks = seen.visible.sum((-2, -1)).clamp(min=1)[:, None]
    q_block = (rows.row // block_size)[:, None, :, None].expand(*keep.shape[:2], -1, keep.shape[3])
    held = torch.where(keep.gather(2, q_block), mass.by_row, 0.0).sum((-2, -1))
    with_evidence = (evidence.sum(-1) > 0).sum(-1).clamp(min=1)
    return (
        torch.zeros(keep.shape[:2], dtype=torch.bool, device=keep.device),
        torch.full(keep.shape[:2], float("nan"), dtype=torch.float32, device=keep.device),
        keep.sum((-2, -1)).float() / visible_blocks,
        lines[0].sum(-1),
        lines[1].sum(-1),
        held / rows.taken.sum(-1).clamp(min=1)[:, None],
        torch.where(keep, evidence, 0.0).sum((-2, -1)) / with_evidence,
    )
