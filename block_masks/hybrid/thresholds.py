"""The rule of hybrid's thresholds, as its plain step and its kernel take it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# a query block whose blocks hold too little halves its threshold at most so often
HALVINGS = 6
# share of a block that may be missing: sums are rounded, and so many equal blocks hold exactly what is asked for
SLACK = 1 / 64


class ThresholdRule(NamedTuple):
    """Constants of `flexmask.block_masks.hybrid`, under their names there; `reference` is LENGTH in blocks."""

    reference: float
    gamma: float
    longer: float
    most_longer: float
    key_block: float
    diagonal: float
    rows: float
    earlier_rows: float
    first_rows: float


class Thresholds(NamedTuple):
    """The least attention that keeps a block or a line, in `widest_float`."""

    lines: Tensor  # (2, batch or 1, num_heads): of key blocks, then of block diagonals
    rows: Tensor  # (batch or 1, num_heads, num_q_blocks)

    @property
    def key_block(self) -> Tensor:
        """(batch or 1, num_heads)."""
        return self.lines[0]

    @property
    def diagonal(self) -> Tensor:
        """(batch or 1, num_heads)."""
        return self.lines[1]
