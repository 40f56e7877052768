"""Hybrid selection by Triton kernels: the steps of `flexmask.plain.hybrid`, under the same names."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import representative_rows
from flexmask.base.search_result import BlockLists, SearchResult
from flexmask.base.visibility import block_visibility, token_validity
from flexmask.config import FlexPrefillConfig
from flexmask.kernels.block_lists import block_lists, density
from flexmask.kernels.last_rows import last_rows_lines
from flexmask.kernels.pooling import split_means
from flexmask.kernels.representative import block_sums, packed_rows
from flexmask.kernels.row_evidence import row_blocks, row_coverage
from flexmask.kernels.vertical_slash import kept_mass, line_mass, row_norms
from flexmask.kernels.visibility import packed_edges


def search(
    inputs: AttentionInputs, config: FlexPrefillConfig, gamma: Tensor, tau: Tensor, with_stats: bool, with_keep: bool
) -> SearchResult:
    """Choose the blocks of every head, as `flexmask.plain.hybrid.search` does."""
    block_size, lengths = config.block_size, (inputs.query.shape[2], inputs.key.shape[2])
    # blocks are chosen by `tokens`; `seen` has those that do not decide as well
    tokens = seen = token_validity(*lengths, inputs.offset, inputs.deciding_tokens(), inputs.key)
    edges = seen_edges = packed_edges(tokens, block_size, inputs.window)
    if inputs.deciding is not None:
        seen = token_validity(*lengths, inputs.offset, None, inputs.key)
        seen_edges = packed_edges(seen, block_size, inputs.window)

    # the last rows: their attention by key block and by block diagonal (S), and the lines kept of it
    rows = representative_rows(config.index_queries, tokens, block_size)
    packed = packed_rows(rows, tokens.offset)
    sums = block_sums(inputs, packed, tokens.key_valid if tokens.padded else None, block_size)
    norms = row_norms(sums)
    lines = last_rows_lines(line_mass(sums, norms, packed, edges.candidates, largest=True), packed, gamma, config)

    # all rows: their attention to the means of the key blocks, and the blocks kept of it
    means = split_means(inputs.key, None if tokens.filled else tokens.key_valid, block_size)
    blocks = row_blocks(inputs, means, tokens, edges, gamma, config)

    *tensors, keep = block_lists(lines, blocks, seen_edges, inputs, block_size, with_keep)
    lists = BlockLists(*tensors)
    if not with_stats:
        return SearchResult(lists, keep, None)
    assert keep is not None
    visible = block_visibility(seen, block_size, inputs.window).visible
    stats = (
        torch.zeros(keep.shape[:2], dtype=torch.bool, device=keep.device),
        torch.full(keep.shape[:2], float("nan"), dtype=torch.float32, device=keep.device),
        density(lists, visible),
        lines.kept[0].sum(-1),
        lines.kept[1].sum(-1),
        kept_mass(keep, rows, sums, norms, block_size) / rows.taken.sum(-1).clamp(min=1)[:, None],
        row_coverage(inputs, means, tokens, edges, keep, config),
    )
    return SearchResult(lists, keep, stats)
