"""Hybrid selection as it is defined: each query block's own rows, and the lines of the representative rows.

Not from the paper: FlexPrefill asks the representative rows alone. What is joined here, by query block r of a head:

- the fewest key blocks j whose ``R[r, j]`` reaches gamma, where R is the mean over every row_stride-th row of r of its softmax
  attention to the means of the key blocks it sees, each weighed by its number of keys;
- the heaviest min_blocks key blocks by V, and the fewest block diagonals whose S reaches the slash share, V and S as in the paper;
- the nearest min_blocks block diagonals, and the blocks that every selection keeps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexmask.reference.margins import COARSE, top_p_margin
from flexmask.reference.result import Decision, Head, Margins, head_mask, no_map
from flexmask.reference.steps import (
    AttentionHead,
    Budget,
    KeyMeans,
    LineMass,
    Options,
    block_means,
    blocks_kept_always,
    extended_lines,
    line_candidates,
    line_mass,
    pooled_attention,
    representative_attention,
    representative_rows,
    top_p,
)
from flexmask.reference.visibility import Visibility

SLASH_SHARE = 0.625  # of gamma


def hybrid_selection(head: AttentionHead, seen: Visibility, options: Options) -> Head:
    """Decide one head."""
    index_rows = representative_rows(options.index_queries, seen)
    attention = representative_attention(head, index_rows, seen)
    mass = line_mass(attention, index_rows, seen)
    key_blocks, diagonals = last_rows_lines(mass, seen, options)
    kept = extended_lines(key_blocks, diagonals, seen)

    evidence = row_evidence(head, block_means(head.key, seen), seen, options.row_stride)
    for r in range(seen.num_q_blocks):
        kept |= {(r, j) for j in top_p(row_candidates(evidence, r, seen), row_budget(options))}

    kept |= blocks_kept_always(seen)
    mask = head_mask(kept, attention, index_rows, seen)
    asked = [r for r in range(seen.num_q_blocks) if evidence[r].sum() > 0]
    covered = float((evidence * mask.keep)[asked].sum()) / len(asked) if asked else 0.0
    decision = Decision(False, math.nan, *mass, no_map(seen), evidence, covered, len(key_blocks), len(diagonals))
    return Head(mask, decision, _margins(mass, evidence, seen, options))


def row_evidence(head: AttentionHead, keys: KeyMeans, seen: Visibility, row_stride: int) -> Tensor:
    """R, (num_q_blocks, num_kv_blocks); 0 in query blocks of which no row is asked."""
    evidence = torch.zeros(seen.num_q_blocks, seen.num_kv_blocks, dtype=torch.float64)
    for r in range(seen.num_q_blocks):
        rows = [row for row in seen.valid_rows if row // seen.block_size == r and row % seen.block_size % row_stride == 0]
        for row in rows:
            blocks = [j for j, pairs in enumerate(seen.pairs[row].split(seen.block_size)) if pairs.any()]
            evidence[r] += pooled_attention(head, [row], keys, blocks) / len(rows)
    return evidence


def row_candidates(evidence: Tensor, r: int, seen: Visibility) -> dict[int, float]:
    """R of the key blocks that query block r sees."""
    return {j: float(evidence[r, j]) for row, j in seen.visible_blocks if row == r}


def row_budget(options: Options) -> Budget:
    """The budget of each query block."""
    return Budget(options.gamma, cap=options.max_blocks)


def line_budgets(options: Options) -> tuple[Budget, Budget]:
    """The budgets of key blocks, which is a number, and of block diagonals."""
    return Budget(1.0, cap=options.min_blocks), Budget(SLASH_SHARE * options.gamma, cap=options.max_blocks)


def last_rows_lines(mass: LineMass, seen: Visibility, options: Options) -> tuple[list[int], list[int]]:
    """The key blocks and the block diagonals of the representative rows, the window among them."""
    (by_key, by_diagonal), (keys, diagonals) = line_candidates(mass, seen), line_budgets(options)
    near = [c for c in seen.diagonals if c < options.min_blocks]
    return top_p(by_key, keys), sorted({*top_p(by_diagonal, diagonals), *near})


def _margins(mass: LineMass, evidence: Tensor, seen: Visibility, options: Options) -> Margins:
    (by_key, by_diagonal), (keys, diagonals) = line_candidates(mass, seen), line_budgets(options)
    lines = top_p_margin(by_key, keys), top_p_margin(by_diagonal, diagonals, COARSE)
    rows = [top_p_margin(row_candidates(evidence, r, seen), row_budget(options)) for r in range(seen.num_q_blocks)]
    matters = (*lines, *rows) if options.gamma < 1 or options.max_blocks is not None else ()
    return Margins(math.inf, *lines, math.inf, min(rows), min(matters, default=math.inf))
