"""Hybrid selection as it is defined: each query block's own rows, and the lines of the representative rows.

Not from the paper: FlexPrefill looks at the representative rows alone. docs/algorithm.md, "Hybrid selection", has the rule with
its constants, which are those of a `Rule` here.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.oracle import steps
from tests.oracle.margins import COARSE, relative
from tests.oracle.result import ReferenceResult, head_mask
from tests.oracle.steps import AttentionHead, KeyMeans, LineMass
from tests.oracle.visibility import Block, Visibility


class Rule(NamedTuple):
    """The constants of the rule."""

    length: float  # tokens at which the thresholds are their multiples of 1 - gamma
    gamma: float
    longer: float
    most_longer: float
    key_block: float
    diagonal: float
    rows: float
    earlier_rows: float
    first_rows: float
    lines: float
    nearest: int
    halvings: int
    slack: float


class Thresholds(NamedTuple):
    """The least share that keeps a line of either kind, and a block of each query block's own."""

    key_block: float
    diagonal: float
    rows: list[float]


def hybrid_selection(
    head: AttentionHead, seen: Visibility, *, gamma: float, min_budget: int, row_stride: int = 8, min_coverage: float = 0.0,
    last_rows_dense: bool = False, rule: Rule,
) -> ReferenceResult:  # fmt: skip
    """Decide one head."""
    least, min_blocks = thresholds(seen, gamma, rule), math.ceil(min_budget / seen.block_size)
    last_rows = steps.representative_rows("last", seen)
    attention = steps.representative_attention(head, last_rows, seen)
    near = rule.nearest * min_blocks

    # the most that one of the rows gives to each key block
    largest = torch.stack([steps.by_block(row, seen.block_size) for row in attention]).amax(0)
    key_blocks = [j for j in seen.key_blocks if largest[j] >= least.key_block]
    left = attention_left(attention, last_rows, key_blocks, near, seen)
    mass = LineMass(largest, steps.slash_mass(left, last_rows, seen))
    diagonals = [c for c in seen.diagonals if mass.slash[c] >= least.diagonal]

    shares = row_shares(head, steps.block_means(head.key, seen), seen, row_stride)
    evidence = torch.stack([rows.square().mean(0).sqrt() for rows in shares])
    of_rows, doubts = set[Block](), []
    for r in range(seen.num_q_blocks):
        own = {j: float(evidence[r, j]) for j in seen.blocks_of(r)}
        chosen, doubt = blocks_of_rows(own, least.rows[r], min_coverage, rule)
        of_rows |= {(r, j) for j in chosen}
        doubts.append(doubt)

    deciding = {row // seen.block_size for row in last_rows}
    on_lines = steps.extended_lines(key_blocks, diagonals, seen)
    of_lines = {(r, j) for r, j in on_lines if r in deciding or evidence[r, j] >= rule.lines * least.rows[r]}

    always = steps.blocks_kept_always(seen) | nearest_blocks(deciding, near, min_blocks, seen)
    if last_rows_dense:
        always |= {(r, j) for r in deciding for j in seen.blocks_of(r)}
    mask = head_mask(of_rows | of_lines | always, attention, last_rows, seen)
    sampled = [float((rows.mean(0) * mask.keep[r]).sum()) for r, rows in enumerate(shares) if rows.any()]
    covered = sum(sampled) / len(sampled) if sampled else math.nan
    least_covered = min(sampled, default=math.nan)
    gated = {(r, j) for r, j in on_lines - always if r not in deciding}
    margin = _margin(mass, evidence, gated, least, rule.lines, doubts, seen) if gamma < 1 else math.inf
    numbers: dict[str, Any] = {"num_vertical_blocks": len(key_blocks), "num_slash_blocks": len(diagonals)}
    coverages: dict[str, Any] = {"row_coverage": covered, "least_row_coverage": least_covered}
    return mask._replace(**mass._asdict(), margin=margin, **numbers, **coverages)


def thresholds(seen: Visibility, gamma: float, rule: Rule) -> Thresholds:
    """From the numbers of key blocks that query blocks see."""
    numbers = [len(seen.blocks_of(r)) for r in range(seen.num_q_blocks)]
    most, at_length = max(numbers), rule.length / seen.block_size
    g = 1 - gamma
    if gamma > rule.gamma and most > at_length:
        exponent = 1 + min(rule.most_longer, rule.longer * math.log2(most / at_length))
        g = (1 - rule.gamma) * (g / (1 - rule.gamma)) ** exponent
    share = g * min(2.0, at_length / most)
    power = rule.earlier_rows * max(0.0, 1 - at_length / most)
    rows = []
    for number in numbers:
        number = max(number, 1)
        first = 1.0
        if gamma < 1:
            first = max(first, (rule.first_rows * at_length / number) ** 3 * (1 - rule.gamma) / g)
        rows.append(rule.rows * share * (most / number) ** power * first**power)
    return Thresholds(rule.key_block * share, rule.diagonal * share, rows)


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


def attention_left(attention: Tensor, rows: list[int], key_blocks: list[int], near: int, seen: Visibility) -> Tensor:
    """Attention of the rows without that to the given key blocks beyond each row's `near` nearest."""
    left = attention.clone()
    for row_attention, row in zip(left, rows, strict=True):
        own = (seen.offset + row) // seen.block_size
        for j in key_blocks:
            if own - j >= near:
                row_attention[j * seen.block_size : (j + 1) * seen.block_size] = 0
    return left


def nearest_blocks(deciding: set[int], near: int, min_blocks: int, seen: Visibility) -> set[Block]:
    """Visible blocks on the nearest block diagonals: `near` of them in `deciding` query blocks, `min_blocks` elsewhere."""

    def reach(r: int) -> int:
        return near if r in deciding else min_blocks

    return {(r, j) for r, j in seen.visible_blocks if any(c < reach(r) for c in seen.diagonals_of(r, j))}


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


def _margin(
    mass: LineMass, evidence: Tensor, gated: set[Block], least: Thresholds, of_lines: float, doubts: list[float], seen: Visibility
) -> float:
    """Least distance from the thresholds; `gated` blocks depend on that of the lines too."""
    by_key, by_diagonal = steps.line_candidates(mass, seen)
    vertical = [relative(share, least.key_block) for share in by_key.values()]
    slash = [relative(share, least.diagonal, COARSE) for share in by_diagonal.values()]
    rows = [relative(float(evidence[r, j]), least.rows[r]) for r, j in seen.visible_blocks]
    rows += [relative(float(evidence[r, j]), of_lines * least.rows[r]) for r, j in gated] + doubts
    return min([*vertical, *slash, *rows], default=math.inf)
