"""Hybrid selection as it is defined: each query block's own rows, and key blocks of the representative rows.

Not from the paper: FlexPrefill looks at the representative rows alone. docs/algorithm.md, "Hybrid selection", has the rule with
its constants, which are those of a `Rule` here.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.oracle import steps
from tests.oracle.margins import relative
from tests.oracle.result import ReferenceResult, head_mask
from tests.oracle.steps import AttentionHead, KeyMeans
from tests.oracle.visibility import Block, Visibility


class Rule(NamedTuple):
    """The constants of the rule, the first two times (1 - gamma)/N."""

    row_multiple: float
    last_row_multiple: float
    halvings: int
    slack: float


def hybrid_selection(
    head: AttentionHead, seen: Visibility, *, gamma: float, min_budget: int, row_stride: int = 8, min_coverage: float = 0.0,
    last_rows_dense: bool = False, prompt_len: int | None = None, rule: Rule,
) -> ReferenceResult:  # fmt: skip
    """Decide one head."""
    # 1 - gamma of what each of as many equal blocks gets as the query block with most sees
    share = (1 - gamma) / max_blocks(seen, prompt_len)
    last_rows = steps.representative_rows("last", seen)
    attention = steps.representative_attention(head, last_rows, seen)

    # the most that one of the rows gives to each key block
    largest = torch.stack([steps.by_block(row, seen.block_size) for row in attention]).amax(0)
    key_blocks = [j for j in seen.key_blocks if largest[j] >= rule.last_row_multiple * share]

    shares = row_shares(head, steps.block_means(head.key, seen), seen, row_stride)
    evidence = torch.stack([rows.square().mean(0).sqrt() for rows in shares])
    of_rows, doubts = set[Block](), []
    for r in range(seen.num_q_blocks):
        own = {j: float(evidence[r, j]) for j in seen.blocks_of(r)}
        chosen, doubt = blocks_of_rows(own, rule.row_multiple * share, min_coverage, rule)
        of_rows |= {(r, j) for j in chosen}
        doubts.append(doubt)

    of_last = {(r, j) for r, j in seen.visible_blocks if j in key_blocks}
    nearest = nearest_blocks(math.ceil(min_budget / seen.block_size), seen)
    always = steps.blocks_kept_always(seen)
    if last_rows_dense:
        always |= {(row // seen.block_size, j) for row in last_rows for j in seen.blocks_of(row // seen.block_size)}
    mask = head_mask(of_rows | of_last | nearest | always, attention, last_rows, seen)
    sampled = [float((rows.mean(0) * mask.keep[r]).sum()) for r, rows in enumerate(shares) if rows.any()]
    covered = sum(sampled) / len(sampled) if sampled else math.nan
    coverages: dict[str, Any] = {"row_coverage": covered, "min_row_coverage": min(sampled, default=math.nan)}
    decided = [relative(float(largest[j]), rule.last_row_multiple * share) for j in seen.key_blocks]
    decided += [relative(float(evidence[r, j]), rule.row_multiple * share) for r, j in seen.visible_blocks] + doubts
    margin = min(decided, default=math.inf) if gamma < 1 else math.inf
    return mask._replace(margin=margin, num_vertical_blocks=len(key_blocks), **coverages)


def max_blocks(seen: Visibility, prompt_len: int | None) -> int:
    """Key blocks of the query block that sees most, in the call and in the rest of the prompt behind its last row."""
    most = max(len(seen.blocks_of(r)) for r in range(seen.num_q_blocks))
    if prompt_len is None:
        return most
    end, size = seen.offset + len(seen.pairs), seen.block_size
    behind = sum(first >= end for first in range(0, prompt_len, size))
    if seen.window is None:
        return most + behind
    # those that the window of some row of a block reaches, far from the prompt's beginning
    start = 2 * size * seen.window
    reached = {key // size for key in range(start - seen.window + 1, start + size)}
    return max(most, min(most + behind, len(reached)))


def blocks_of_rows(evidence: dict[int, float], least: float, min_coverage: float, rule: Rule) -> tuple[set[int], float]:
    """The key blocks that a query block's own rows choose of those it sees, and the margin of what a floor decides."""
    needed = min_coverage * sum(evidence.values())
    chosen = {j for j, share in evidence.items() if share >= least}
    if min_coverage == 0 or needed == 0 or least == 0:
        return chosen, math.inf
    held = sum(evidence[j] for j in chosen)
    margin = abs(held - needed) / needed
    for halving in range(1, rule.halvings + 1):
        if held >= needed:
            return chosen, margin
        added = sorted(j for j, share in evidence.items() if least / 2**halving <= share and j not in chosen)
        margin = min([margin, *(relative(share, least / 2**halving) for share in evidence.values())])
        more = sum(evidence[j] for j in added)
        margin = min(margin, abs(held + more - needed) / needed)
        if held + more >= needed:
            wanted = len(added) * (needed - held) / more - rule.slack
            # what another rounding of the sums may change
            margin = min(margin, abs(wanted - round(wanted)) / len(added))
            return chosen | set(added[len(added) - math.ceil(wanted) :]), margin
        chosen, held = chosen | set(added), held + more
    return (chosen, margin) if held >= needed else (set(evidence), margin)


def nearest_blocks(number: int, seen: Visibility) -> set[Block]:
    """Visible blocks on the nearest `number` block diagonals."""
    return {(r, j) for r, j in seen.visible_blocks if any(c < number for c in seen.diagonals_of(r, j))}


def row_shares(head: AttentionHead, keys: KeyMeans, seen: Visibility, row_stride: int) -> list[Tensor]:
    """Pooled attention of the sampled rows by query block, (rows, num_kv_blocks); a row of zeros where none is."""
    shares = []
    for r in range(seen.num_q_blocks):
        rows = [row for row in seen.rows_of(r) if row % seen.block_size % row_stride == 0]
        attention = [torch.zeros(seen.num_kv_blocks, dtype=torch.float64)] if not rows else []
        for row in rows:
            blocks = [j for j, pairs in enumerate(seen.pairs[row].split(seen.block_size)) if pairs.any()]
            attention.append(steps.pooled_attention(head, [row], keys, blocks))
        shares.append(torch.stack(attention))
    return shares
