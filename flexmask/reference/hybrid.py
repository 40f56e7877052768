"""Hybrid selection as it is defined: each query block's own rows, and the lines of the representative rows.

Not from the paper: FlexPrefill asks the representative rows alone. With ``e = 1 - gamma``, query block r of a head keeps

- each key block j with ``R[r, j] >= e / 5``: R is the root mean square, over every row_stride-th row of r, of the row's softmax
  attention to the means of the key blocks it sees, each weighed by its number of keys;
- each key block to which some representative row gives ``>= e`` of its attention, and the heaviest by that measure;
- each block diagonal with ``S >= e / 5``, S as in the paper, and the nearest; of the heaviest and of the nearest half of
  min_blocks each, rounded up;
- if it holds a representative row, each block on one of the nearest 2 * min_blocks block diagonals;
- the blocks that every selection keeps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexmask.reference.margins import COARSE, gap
from flexmask.reference.result import Decision, Head, Margins, head_mask, no_map
from flexmask.reference.steps import (
    AttentionHead,
    KeyMeans,
    LineMass,
    Options,
    block_means,
    blocks_kept_always,
    by_block,
    extended_lines,
    heaviest_first,
    line_candidates,
    pooled_attention,
    representative_attention,
    representative_rows,
    slash_mass,
)
from flexmask.reference.visibility import Block, Visibility


def hybrid_selection(head: AttentionHead, seen: Visibility, options: Options) -> Head:
    """Decide one head."""
    index_rows = representative_rows(options.index_queries, seen)
    attention = representative_attention(head, index_rows, seen)
    mass = LineMass(largest_share(attention, seen), slash_mass(attention, index_rows, seen))
    key_blocks, diagonals = last_rows_lines(mass, seen, options)
    kept = extended_lines(key_blocks, diagonals, seen)

    shares = row_shares(head, block_means(head.key, seen), seen, options.row_stride)
    evidence = torch.stack([rows.square().mean(0).sqrt() for rows in shares])
    kept |= {(r, j) for r, j in seen.visible_blocks if evidence[r, j] >= (1 - options.gamma) / 5}

    kept |= nearest_blocks(index_rows, seen, options)
    kept |= blocks_kept_always(seen)
    mask = head_mask(kept, attention, index_rows, seen)
    asked = [float((rows.mean(0) * mask.keep[r]).sum()) for r, rows in enumerate(shares) if rows.any()]
    covered = sum(asked) / len(asked) if asked else math.nan
    decision = Decision(False, math.nan, *mass, no_map(seen), evidence, covered, len(key_blocks), len(diagonals))
    return Head(mask, decision, _margins(mass, evidence, seen, options))


def largest_share(attention: Tensor, seen: Visibility) -> Tensor:
    """The most that one of the rows gives to each key block, (num_kv_blocks,)."""
    return torch.stack([by_block(row, seen.block_size) for row in attention]).amax(0)


def last_rows_lines(mass: LineMass, seen: Visibility, options: Options) -> tuple[list[int], list[int]]:
    """The key blocks and the block diagonals of the representative rows."""
    dropped = 1 - options.gamma
    by_key, by_diagonal = line_candidates(mass, seen)
    heavy = [j for j, share in by_key.items() if share >= dropped]
    floor = math.ceil(options.min_blocks / 2)
    heaviest = heaviest_first(by_key)[:floor]
    slashes = [c for c, share in by_diagonal.items() if share >= dropped / 5 or c < floor]
    return sorted({*heavy, *heaviest}), slashes


def nearest_blocks(index_rows: list[int], seen: Visibility, options: Options) -> set[Block]:
    """The visible blocks on the nearest block diagonals of every query block that holds a representative row."""
    blocks = set()
    for r in {row // seen.block_size for row in index_rows}:
        for j in [j for query_block, j in seen.visible_blocks if query_block == r]:
            if any(c < 2 * options.min_blocks for c in seen.diagonals_of(r, j)):
                blocks.add((r, j))
    return blocks


def row_shares(head: AttentionHead, keys: KeyMeans, seen: Visibility, row_stride: int) -> list[Tensor]:
    """Pooled attention of the rows asked of each query block, (rows, num_kv_blocks); a row of zeros where none is asked."""
    shares = []
    for r in range(seen.num_q_blocks):
        rows = [row for row in seen.valid_rows if row // seen.block_size == r and row % seen.block_size % row_stride == 0]
        attention = [torch.zeros(seen.num_kv_blocks, dtype=torch.float64)] if not rows else []
        for row in rows:
            blocks = [j for j, pairs in enumerate(seen.pairs[row].split(seen.block_size)) if pairs.any()]
            attention.append(pooled_attention(head, [row], keys, blocks))
        shares.append(torch.stack(attention))
    return shares


def _margins(mass: LineMass, evidence: Tensor, seen: Visibility, options: Options) -> Margins:
    by_key, by_diagonal = line_candidates(mass, seen)
    dropped = 1 - options.gamma
    order = [by_key[j] for j in heaviest_first(by_key)]
    vertical = [_from(share, dropped) for share in order]
    floor = math.ceil(options.min_blocks / 2)
    if 0 < floor < len(order) and order[floor] < dropped:
        vertical.append(gap(order[floor - 1], order[floor]))
    slash = [_from(share, dropped / 5, COARSE) for share in by_diagonal.values()]
    rows = [_from(float(evidence[r, j]), dropped / 5) for r, j in seen.visible_blocks]
    each = [min(values, default=math.inf) for values in (vertical, slash, rows)]
    return Margins(math.inf, each[0], each[1], math.inf, each[2], min(each) if options.gamma < 1 else math.inf)


def _from(value: float, threshold: float, coarse: float = 0.0) -> float:
    """Distance of a value from a threshold, relative to it or to `coarse`, whichever is more; inf where that is 0."""
    return abs(value - threshold) / max(threshold, coarse) if threshold > 0 else math.inf
