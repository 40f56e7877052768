"""The steps of hybrid selection in PyTorch: key blocks of the last rows, and evidence of all rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem, FloatOption, is_off
from flexmask.base.scores import masked_softmax
from flexmask.base.selection import ChosenBlocks
from flexmask.base.visibility import blocks_seen_by_rows, candidate_lines, split_into_blocks
from flexmask.plain import RepresentativeMass, pooled_scores

# how often a query block whose blocks hold too little evidence halves its threshold, at most
HALVINGS = 6
# part of a block that may be missing: sums are rounded, and some number of equal blocks holds exactly what is needed
SLACK = 1 / 64


class Rule(NamedTuple):
    """The constants of the method, multiples of `threshold_unit`. bench/HYBRID_ABLATIONS.md says how they were chosen."""

    # threshold of a query block's root mean square attention to key means, which keeps a key block there
    row_multiple: float = 32
    # threshold of one of the last rows' attention, which keeps a key block for all query blocks
    last_row_multiple: float = 80


def threshold_unit(problem: BlockProblem, gamma: Tensor) -> Tensor:
    """``(1 - gamma) / N`` with N = `BlockProblem.max_num_blocks_seen`, (batch or 1, num_heads); thresholds are its multiples."""
    return (1 - gamma) / problem.max_num_blocks_seen().unsqueeze(-1).clamp(min=1)


def key_blocks(problem: BlockProblem, mass: RepresentativeMass, gamma: Tensor, multiple: float) -> Tensor:
    """Key blocks to which one of the last rows gives at least `multiple` units, (1, batch, num_heads, num_kv_blocks) bool.

    NaN reaches every threshold.
    """
    largest = torch.where(mass.rows.valid[:, None, :, None], mass.lines.by_row, 0.0).amax(2)
    threshold = (multiple * threshold_unit(problem, gamma)).float()
    return (~(largest < threshold.unsqueeze(-1)) & candidate_lines(problem.visibility)[0].unsqueeze(1)).unsqueeze(0)


class RowBlocks(NamedTuple):
    """Blocks that the rows of each query block choose."""

    blocks: ChosenBlocks
    # from a map of kept blocks to the mean attention that they hold: mean and minimum over query blocks, (batch, num_heads) each
    coverage: Callable[[Tensor], tuple[Tensor, Tensor]]


class RowEvidence(NamedTuple):
    """Attention of the sampled rows to key means, (batch, num_heads, num_q_blocks, num_kv_blocks) float32; 0 without any."""

    root_mean_square: Tensor  # R: over the sampled rows of a query block
    mean: Tensor  # over the same rows


def row_evidence(problem: BlockProblem, row_stride: int) -> RowEvidence:
    """Attention of every `row_stride`-th row of each query block to the means of the key blocks it sees."""
    inputs, tokens, block_size = problem.inputs, problem.tokens, problem.block_size
    key_means, key_counts = problem.key_means(), problem.key_counts()
    query = split_into_blocks(inputs.query, block_size, 2)
    valid = split_into_blocks(tokens.row_valid, block_size)
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


def row_blocks(problem: BlockProblem, row_stride: int, gamma: Tensor, multiple: float, min_coverage: FloatOption) -> RowBlocks:
    """The key blocks whose evidence reaches `multiple` units, and those that `with_evidence_floor` adds; NaN reaches all."""
    rows = row_evidence(problem, row_stride)
    evidence, threshold = rows.root_mean_square, (multiple * threshold_unit(problem, gamma))[..., None, None]
    chosen = ~(evidence < threshold.float())
    if not is_off(min_coverage):
        chosen = with_evidence_floor(problem, evidence, threshold, problem.as_tensor(min_coverage).to(evidence.dtype))
    return RowBlocks(ChosenBlocks(chosen), functools.partial(row_coverage, problem, rows))


def with_evidence_floor(problem: BlockProblem, evidence: Tensor, threshold: Tensor, min_coverage: Tensor) -> Tensor:
    """Halve the threshold, at most `HALVINGS` times, until the chosen blocks hold `min_coverage` of the evidence.

    Of the blocks that the last halving adds, keep the nearest; their number is the missing evidence divided by their mean. If no
    halving suffices, keep every visible block.
    """
    needed = min_coverage * evidence.sum(-1, keepdim=True)
    chosen = ~(evidence < threshold.float())
    held = torch.where(chosen, evidence, 0.0).sum(-1, keepdim=True)
    for halving in range(1, HALVINGS + 1):
        reaches = ~(evidence < (threshold * 2.0**-halving).float())
        held_then = torch.where(reaches, evidence, 0.0).sum(-1, keepdim=True)
        added = reaches & ~chosen & problem.visible
        num_added = added.sum(-1, keepdim=True)
        gained = torch.where(held_then > held, held_then - held, 1.0)
        num_kept = (num_added * ((needed - held) / gained) - SLACK).ceil()
        # key blocks ascend: the nearest are the last
        nearest = added & (added.cumsum(-1, dtype=torch.int32) > num_added - num_kept)
        is_low = held < needed
        chosen = torch.where(is_low, torch.where(held_then < needed, reaches, chosen | nearest), chosen)
        held = torch.where(is_low, held_then, held)
    return chosen | ((held < needed) & problem.visible)


def row_coverage(problem: BlockProblem, evidence: RowEvidence, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in kept blocks: mean and minimum over query blocks, (batch, num_heads) each."""
    has_rows = evidence.mean.sum(-1) != 0
    return mean_and_least(problem, torch.where(keep, evidence.mean, 0.0).sum(-1), has_rows)


def mean_and_least(problem: BlockProblem, in_kept: Tensor, has_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and minimum of `in_kept` over query blocks that `has_rows`; 0 in a batch row without rows, NaN if none is sampled."""
    num_sampled = has_rows.sum(-1)
    mean = torch.where(has_rows, in_kept, 0.0).sum(-1) / num_sampled
    # amin keeps NaN
    least = torch.where(num_sampled > 0, torch.where(has_rows, in_kept, math.inf).amin(-1), math.nan)
    is_absent = ~problem.tokens.row_valid.any(-1, keepdim=True)
    return torch.where(is_absent, 0.0, mean), torch.where(is_absent, 0.0, least)
