"""Selections that hybrid was compared with, as methods: settings name them ``bench/answers/ablations.py:FUNCTION``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexmask.base.selection import Choice, ChosenBlocks
from flexmask.base.visibility import num_blocks
from flexmask.block_masks.flexprefill import FlexPrefill
from flexmask.block_masks.hybrid import RULE, Hybrid, plain
from flexmask.mask_function import BlockProblem, mask_function

if torch.cuda.is_available():
    from flexmask.block_masks.hybrid import kernels
    from flexmask.block_masks.hybrid.row_evidence_kernel import squares_of_shares
    from flexmask.kernels.pooling import split_key_means


def row_evidence(problem: BlockProblem, row_stride: int) -> Tensor:
    """Hybrid's R, (batch, num_heads, num_q_blocks, num_kv_blocks) float32, 0 where a block is not visible."""
    if problem.by_kernels:
        squares, number = squares_of_shares(problem, split_key_means(problem), row_stride)
        evidence = (squares / number.clamp(min=1).unsqueeze(-1)).sqrt()
    else:
        evidence = plain.row_evidence(problem, row_stride).root_mean_square
    return torch.where(problem.visible, evidence, 0.0)


class Ablation(Hybrid):
    """Hybrid with other `own_blocks`, the blocks that a query block's own rows choose."""

    def own_blocks(self, problem: BlockProblem) -> Tensor:
        raise NotImplementedError

    def lines(self, key_blocks: Tensor, problem: BlockProblem) -> Tensor:
        """Key blocks of the last rows, (1, batch, num_heads, num_kv_blocks), as they are kept."""
        return key_blocks

    def gamma_of(self, problem: BlockProblem) -> Any:
        return self.gamma if problem.by_kernels else problem.as_tensor(self.gamma, (problem.inputs.query.shape[1],))

    def select(self, problem: BlockProblem) -> Choice:
        steps: Any = kernels if problem.by_kernels else plain
        last = problem.steps.representative_mass(problem, "last")
        key_blocks = steps.key_blocks(problem, last, self.gamma_of(problem), RULE.last_row_multiple)
        own = self.own_blocks(problem) & problem.visible
        blocks = ChosenBlocks((own.to(torch.int8) if problem.by_kernels else own).contiguous())
        nearest, dense_rows = num_blocks(self.min_budget, problem.block_size), last.rows if self.last_rows_dense else None
        return Choice(*problem.steps.kept_blocks(problem, self.lines(key_blocks, problem), blocks, nearest, dense_rows))


@dataclass(frozen=True, eq=False)
class UnionWithFlexPrefill(Ablation):
    """Hybrid's blocks and those of flexprefill at gamma `other`; with `tau` 0 its lines only.

    Examples
    --------
    >>> union.method.defaults["other"]
    0.595
    """

    _: KW_ONLY
    other: float = 0.595
    tau: float = 0.1

    def own_blocks(self, problem: BlockProblem) -> Tensor:
        steps: Any = kernels if problem.by_kernels else plain
        gamma = self.gamma_of(problem)
        own = steps.row_blocks(problem, self.row_stride, gamma, RULE.row_multiple, self.min_coverage).blocks.chosen.bool()
        options = {"gamma": float(self.other), "tau": float(self.tau), "min_budget": 256}
        theirs = FlexPrefill.unchecked(block_size=problem.block_size, **{**FlexPrefill.defaults, **options})
        kept = theirs.select(replace(problem, with_map=True)).keep
        assert kept is not None
        return (own & problem.visible) | kept


@dataclass(frozen=True, eq=False)
class NoiseFloor(Ablation):
    """A query block keeps what gets `times` the mean of its evidence without the first block; no floor, no even share.

    Source: the idea of CRISP (https://arxiv.org/abs/2609.01925), thresholds above a noise floor that leaves the sink out; of its
    code we have seen none.

    Examples
    --------
    >>> noise_floor.method.defaults["times"]
    1.337
    """

    _: KW_ONLY
    times: float = 1.337

    def own_blocks(self, problem: BlockProblem) -> Tensor:
        evidence, others = row_evidence(problem, self.row_stride), problem.visible & ~problem.first_blocks(1)
        mean = torch.where(others, evidence, 0.0).sum(-1, keepdim=True) / others.sum(-1, keepdim=True).clamp(min=1)
        return evidence >= float(self.times) * mean


@dataclass(frozen=True, eq=False)
class SharedByKeyHead(Ablation):
    """The query heads of a KV head share a selection, by the root mean square of their evidence and all their key blocks.

    Examples
    --------
    >>> shared.method.defaults["gamma"]
    0.9
    """

    def own_blocks(self, problem: BlockProblem) -> Tensor:
        evidence, kv_heads = row_evidence(problem, self.row_stride), problem.inputs.key.shape[1]
        queries_per_kv = evidence.shape[1] // kv_heads
        of_key = evidence.square().unflatten(1, (kv_heads, queries_per_kv)).mean(2).sqrt()
        # one gamma for all heads
        gamma = problem.as_tensor(self.gamma, (evidence.shape[1],))[:1].expand(kv_heads)
        thresholds = (RULE.row_multiple * plain.threshold_unit(problem, gamma))[..., None, None]
        least = torch.tensor(float(self.min_coverage), device=evidence.device)
        return plain.with_evidence_floor(problem, of_key, thresholds, least).repeat_interleave(queries_per_kv, 1)

    def lines(self, key_blocks: Tensor, problem: BlockProblem) -> Tensor:
        kv_heads = problem.inputs.key.shape[1]
        queries_per_kv = key_blocks.shape[2] // kv_heads
        of_key = key_blocks.unflatten(2, (kv_heads, queries_per_kv)).any(3)
        return of_key.repeat_interleave(queries_per_kv, 2).to(key_blocks.dtype).contiguous()


union = mask_function("hybrid_and_flexprefill", UnionWithFlexPrefill)
noise_floor = mask_function("noise_floor", NoiseFloor)
shared = mask_function("shared_by_kv_head", SharedByKeyHead)
