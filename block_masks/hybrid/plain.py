"""The steps of hybrid selection in PyTorch: thresholds, lines of the last rows, and evidence of all rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem, Number, is_off
from flexmask.base.scores import masked_softmax
from flexmask.base.visibility import blocks_seen_by_rows, candidate_lines, in_blocks, valid_keys, whole_blocks
from flexmask.plain import Blocks, RepresentativeMass, line_mass, pooled_scores

# a query block whose blocks hold too little halves its threshold at most so often
HALVINGS = 6
# share of a block that may be missing: sums are rounded, and some number of equal blocks holds exactly the share needed
SLACK = 1 / 64


class Rule(NamedTuple):
    """The constants of the method, in capitals in docs/design.md, "Why these constants", which has how they were chosen."""

    # prompt tokens at which thresholds are the multiples of 1 - gamma below; they follow a block's even share, at most doubled
    length: int = 16384
    # above this gamma they fall faster with the length: (1 - its gamma)/(1 - this) is raised to 1 + longer per doubling of the
    # length, the latter at most most_longer
    gamma: float = 0.9
    longer: float = 1 / 2
    most_longer: float = 1
    # share of one representative row's attention that keeps a key block
    key_block: float = 0.5
    # share of their mean attention, outside those key blocks, that keeps a block diagonal
    diagonal: float = 0.2
    # root mean square share of a query block's attention to key means that keeps a key block
    rows: float = 0.2
    # the threshold of a query block that sees n of N key blocks is (N/n)^p times as high: p is 0 up to length, nears this beyond
    earlier_rows: float = 0.6
    # share of length, n1 blocks: where (n1/n)^3 (1 - gamma)/g > 1, g below, the threshold is multiplied by its pth power too
    first_rows: float = 1 / 2
    # share of its threshold below which a query block takes no line
    lines: float = 1 / 16
    # query blocks with representative rows keep this many times the nearest blocks, and attention to kept key blocks counts for
    # block diagonals that near
    nearest: int = 8


class Thresholds(NamedTuple):
    """The least attention that keeps a block or a line, in `widest_float`."""

    lines: Tensor  # (2, batch or 1, num_heads): of key blocks, then of block diagonals
    rows: Tensor  # (batch or 1, num_heads, num_q_blocks)


def thresholds(problem: BlockProblem, gamma: Tensor, rule: Rule) -> Thresholds:
    """Thresholds per query block, from the number n of key blocks it sees and the largest of its batch row, N."""
    seen, most = (number.to(gamma.dtype) for number in problem.blocks_seen())
    reference = rule.length / problem.block_size
    longer = (rule.longer * (most / reference).clamp(min=1).log2()).clamp(max=rule.most_longer)
    g = (1 - gamma) * ((1 - gamma).clamp(min=1e-6) / (1 - rule.gamma)).clamp(max=1) ** longer
    shares = g * (reference / most.clamp(min=1)).clamp(max=2)
    power = rule.earlier_rows * (1 - reference / most).clamp(min=0)
    seen = seen.clamp(min=1).unsqueeze(1)
    of_gamma = (1 - rule.gamma) / g.clamp(min=1e-12).unsqueeze(-1)
    first = ((rule.first_rows * reference / seen) ** 3 * of_gamma).clamp(min=1)
    earlier = (most.unsqueeze(1) / seen * first) ** power.unsqueeze(1)
    lines = torch.stack([rule.key_block * shares, rule.diagonal * shares])
    return Thresholds(lines, rule.rows * shares.unsqueeze(-1) * earlier)


def last_rows_lines(problem: BlockProblem, last: RepresentativeMass, thresholds: Tensor, near: int) -> Tensor:
    """Key blocks to which a row gives at least its threshold, and block diagonals to which the rows do on average.

    The latter without attention to kept key blocks beyond a row's `near` nearest. NaN reaches all `thresholds`.
    """
    in_vertical, in_slash = candidate_lines(problem.seen).unsqueeze(2).unbind(0)
    rows, (of_key_block, of_diagonal) = last.rows, thresholds.unbind(0)
    most = torch.where(rows.valid[:, None, :, None], last.mass.by_row, 0.0).amax(2)
    vertical = ~(most < of_key_block.float().unsqueeze(-1)) & in_vertical

    own_block = rows.position // problem.block_size
    far = own_block.unsqueeze(-1) - torch.arange(most.shape[-1], device=most.device) >= near
    left = line_mass(last.attention, rows, problem.block_size, vertical.unsqueeze(2) & far[:, None]).slash
    slash = ~(left < of_diagonal.float().unsqueeze(-1)) & in_slash
    return torch.stack([vertical, slash])


class RowEvidence(NamedTuple):
    """Attention of the sampled rows to key means, (batch, num_heads, num_q_blocks, num_kv_blocks) float32; 0 without any."""

    root_mean_square: Tensor  # R, over the rows of a query block
    mean: Tensor


def row_evidence(problem: BlockProblem, row_stride: int) -> RowEvidence:
    """Attention of every `row_stride`-th row of each query block to the means of the key blocks it sees."""
    inputs, tokens, block_size = problem.inputs, problem.tokens, problem.block_size
    key_means, key_counts = problem.key_means(), valid_keys(tokens, block_size)
    query = whole_blocks(inputs.query, 2, block_size)
    valid = in_blocks(tokens.row_valid, block_size, False)
    first_row = tokens.offset.unsqueeze(-1) + torch.arange(valid.shape[1], device=query.device) * block_size
    sampled = valid[..., ::row_stride].sum(-1).clamp(min=1)[:, None, :, None]
    shape = (*query.shape[:3], key_means.shape[2])
    mean, square = (torch.zeros(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    # one row of every block at a time: scores take no more memory than the result
    for slot in range(0, block_size, row_stride):
        is_valid = valid[..., slot]
        rows = query[:, :, :, slot].float().masked_fill(~is_valid[:, None, :, None], 0)
        sees = (blocks_seen_by_rows(first_row + slot, tokens, block_size, inputs.window) & is_valid.unsqueeze(-1))[:, None]
        scores = pooled_scores(rows, key_means, key_counts, inputs.scale, inputs.softcap)
        share = torch.where(sees, masked_softmax(scores, sees), 0.0)
        mean = mean + share
        square = square + share * share
    return RowEvidence((square / sampled).sqrt(), mean / sampled)


def row_blocks(problem: BlockProblem, evidence: RowEvidence, thresholds: Tensor, of_lines: float, min_coverage: Number) -> Blocks:
    """The key blocks whose evidence reaches `thresholds`, with `more_blocks`, and `of_lines` times that; NaN reaches both."""
    share, thresholds = evidence.root_mean_square, thresholds.unsqueeze(-1)
    chosen, lines = ~(share < thresholds.float()), ~(share < (of_lines * thresholds).float())
    if not is_off(min_coverage):
        chosen = more_blocks(problem, share, thresholds, problem.as_tensor(min_coverage).to(share.dtype))
    return Blocks(chosen, lines)


def more_blocks(problem: BlockProblem, share: Tensor, thresholds: Tensor, min_coverage: Tensor) -> Tensor:
    """Blocks that reach the thresholds, halved at most `HALVINGS` times until these hold `min_coverage` of the evidence.

    Of those that the last halving adds the nearest stay, as many as hold the missing part if each holds the same. If no halving
    suffices every visible block stays.
    """
    needed = min_coverage * share.sum(-1, keepdim=True)
    chosen = ~(share < thresholds.float())
    before = torch.where(chosen, share, 0.0).sum(-1, keepdim=True)
    for halving in range(1, HALVINGS + 1):
        more = ~(share < (thresholds * 2.0**-halving).float())
        after = torch.where(more, share, 0.0).sum(-1, keepdim=True)
        last = more & ~chosen & problem.visible
        number = last.sum(-1, keepdim=True)
        added = torch.where(after > before, after - before, 1.0)
        wanted = (number * ((needed - before) / added) - SLACK).ceil()
        # key blocks ascend: of equal ones the nearest are the last
        nearest = last & (last.cumsum(-1, dtype=torch.int32) > number - wanted)
        is_low = before < needed
        chosen = torch.where(is_low, torch.where(after < needed, more, chosen | nearest), chosen)
        before = torch.where(is_low, after, before)
    return chosen | ((before < needed) & problem.visible)


def row_coverage(problem: BlockProblem, evidence: RowEvidence, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Evidence that the kept blocks hold, mean and least of the query blocks with sampled rows, (batch, num_heads) each."""
    has_rows = evidence.mean.sum(-1) != 0
    return mean_and_least(problem, torch.where(keep, evidence.mean, 0.0).sum(-1), has_rows)


def mean_and_least(problem: BlockProblem, in_kept: Tensor, has_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and least over the query blocks of `has_rows`; 0 in a batch row without rows, NaN if none is sampled."""
    number = has_rows.sum(-1)
    mean = torch.where(has_rows, in_kept, 0.0).sum(-1) / number
    # amin keeps NaN
    least = torch.where(number > 0, torch.where(has_rows, in_kept, math.inf).amin(-1), math.nan)
    is_absent = ~problem.tokens.row_valid.any(-1, keepdim=True)
    return torch.where(is_absent, 0.0, mean), torch.where(is_absent, 0.0, least)
