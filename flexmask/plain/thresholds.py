"""Hybrid's thresholds per head and query block."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.thresholds import ThresholdRule, Thresholds


def thresholds(problem: BlockProblem, gamma: Tensor, rule: ThresholdRule) -> Thresholds:
    """Thresholds per query block, from the number n of key blocks it sees and the largest of its batch row, N.

    Padding does not count. `gamma` is (num_heads,) in `widest_float`.
    """
    seen, most = (number.to(gamma.dtype) for number in problem.blocks_seen())
    longer = (rule.longer * (most / rule.reference).clamp(min=1).log2()).clamp(max=rule.most_longer)
    g = (1 - gamma) * ((1 - gamma).clamp(min=1e-6) / (1 - rule.gamma)).clamp(max=1) ** longer
    shares = g * (rule.reference / most.clamp(min=1)).clamp(max=2)
    power = rule.earlier_rows * (1 - rule.reference / most).clamp(min=0)
    seen = seen.clamp(min=1).unsqueeze(1)
    of_gamma = (1 - rule.gamma) / g.clamp(min=1e-12).unsqueeze(-1)
    first = ((rule.first_rows * rule.reference / seen) ** 3 * of_gamma).clamp(min=1)
    earlier = (most.unsqueeze(1) / seen * first) ** power.unsqueeze(1)
    lines = torch.stack([rule.key_block * shares, rule.diagonal * shares])
    return Thresholds(lines, rule.rows * shares.unsqueeze(-1) * earlier)
