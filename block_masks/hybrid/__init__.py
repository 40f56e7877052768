"""Hybrid: evidence from all query rows, joined with key blocks of the last rows. The method we recommend."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from torch import Tensor

from flexmask._torch import HAS_TRITON
from flexmask.base.blocks import FloatOption
from flexmask.base.checks import check_bool, check_int
from flexmask.base.head_groups import plain_bytes
from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import Choice
from flexmask.base.visibility import num_blocks
from flexmask.block_masks.hybrid import plain
from flexmask.block_masks.hybrid.plain import RowBlocks, Rule
from flexmask.mask_function import BlockProblem, ByHead, Method, count_option, mask_function, share_option

if HAS_TRITON:
    from flexmask.block_masks.hybrid import kernels

RULE = Rule()


class _Steps(Protocol):
    """The method's own steps: `plain` or `kernels`."""

    def key_blocks(self, problem: BlockProblem, mass: Any, gamma: Any, multiple: float, /) -> Tensor: ...
    def row_blocks(
        self, problem: BlockProblem, row_stride: int, gamma: Any, multiple: float, min_coverage: FloatOption, /
    ) -> RowBlocks: ...


@dataclass(frozen=True, eq=False)
class Hybrid(Method):
    """Hybrid selection: each query block keeps what its own rows attend to, and key blocks of the last rows.

    Source: none, it is ours (`docs/hybrid.md`). With N the most key blocks that a query block of the batch row sees, in this call
    or with `prompt_len` in the whole prompt, and ``e = (1 - gamma)/N``, a head keeps in query block r

    - each key block j with ``R[r, j] >= 32 e``: R is the root mean square, over every `row_stride`-th row of r from its first on,
      padding left out, of the row's softmax attention to the means of visible key blocks, weighted by their number of keys;
    - more of them where these hold less than `min_coverage` of the evidence, the sum of R[r, j] over j: the threshold is halved,
      at most six times, until the chosen blocks hold it. Of the m blocks that the last halving adds, the nearest
      ``ceil(m f - 1/64)`` are kept, where f is the missing evidence divided by what all m hold. If six halvings do not suffice
      (up to ``(1 + gamma)/2`` they do), every visible block is kept;
    - each key block to which one of the last `block_size` rows gives ``>= 80 e`` of its attention;
    - the blocks on its nearest ``ceil(min_budget / block_size)`` block diagonals; each row counts these from its own block;
    - its first visible key block and its diagonal;
    - with `last_rows_dense`, every visible block if r holds one of the last `block_size` rows.

    While it is made, a mask takes up to 10 bytes per pair of blocks on CUDA, elsewhere 80; statistics take a second pass over the
    evidence. The other parameters, the result and the errors are as in `flexprefill_mask`.

    Parameters
    ----------
    gamma
        Higher keeps more blocks, for less error and less speed: thresholds are proportional to ``1 - gamma``. Range (0, 1]; 1
        keeps every visible block. Default 0.9 (ours). Per head as in flexprefill.
    min_budget
        Tokens' worth of the nearest blocks that every query block keeps. Range >= 0, default 256 (ours).
    row_stride
        Rows: every row_stride-th of a query block is scored. A divisor of block_size, at least a 32nd of it. Default 8 (ours: 1
        takes eight times the scores).
    min_coverage
        Least share of its evidence R that each query block keeps. Range [0, 1], default 0.5 (ours; `bench/HYBRID_ABLATIONS.md`
        shows how many blocks it adds): heads that attend evenly keep half. 0 switches it off.
    last_rows_dense
        True if each query block with one of the last `block_size` rows, padding left out, keeps every visible block: usually one
        query block, two if these rows cross its border, more if padding lies between them. In chunks these are the chunk's last
        rows. Other query blocks keep the same either way. Default True (ours).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> mask = hybrid_mask(query, key, gamma=0.9, block_size=64, min_budget=128)
    >>> mask.shape
    (1, 4, 512, 512)
    """

    has_kernels = True
    only_launches = True

    gamma: ByHead = 0.9
    _: KW_ONLY
    min_budget: int = count_option(256, 0, "tokens")
    row_stride: int = 8
    min_coverage: float = share_option(0.5, "[0, 1]")
    last_rows_dense: bool = True

    def select(self, problem: BlockProblem) -> Choice:
        shared_steps, nearest = problem.steps, num_blocks(self.min_budget, problem.block_size)
        own_steps: _Steps = kernels if problem.by_kernels else plain

        # the last rows: true attention, and the key blocks kept of it
        last_mass = shared_steps.representative_mass(problem, "last", with_diagonals=False)
        key_blocks = own_steps.key_blocks(problem, last_mass, self.gamma, RULE.last_row_multiple)

        # all rows: attention to key means, and the blocks kept of it
        row_blocks = own_steps.row_blocks(problem, self.row_stride, self.gamma, RULE.row_multiple, self.min_coverage)

        lists, keep = shared_steps.kept_blocks(
            problem, key_blocks, row_blocks.blocks, nearest, last_mass.rows if self.last_rows_dense else None
        )
        # one pass over the evidence gives both; `keep` is the same map in both calls
        covered: list[Tensor] = []

        def row_coverage(keep: Tensor, index: int) -> Tensor:
            if not covered:
                covered.extend(row_blocks.coverage(keep))
            return covered[index]

        return Choice(
            lists,
            keep,
            {
                "num_vertical_blocks": lambda _: key_blocks[0].sum(-1),
                "coverage": lambda keep: shared_steps.coverage(problem, last_mass, keep),
                "row_coverage": lambda keep: row_coverage(keep, 0),
                "min_row_coverage": lambda keep: row_coverage(keep, 1),
            },
        )

    def check(self) -> None:
        check_bool("last_rows_dense", self.last_rows_dense)
        check_int("row_stride", self.row_stride)
        size, stride = self.block_size, self.row_stride
        if stride < 1 or 32 * stride < size or size % stride != 0:
            raise ValueError(f"row_stride must be a divisor of block_size ({size}) and at least a 32nd of it; got {stride}")

    def keeps_every_block(self) -> bool:
        return bool(self.gamma == 1)

    def last_rows_are_dense(self) -> bool:
        # a subclass may choose otherwise
        return self.last_rows_dense and type(self).select is Hybrid.select

    def selection_bytes(self, inputs: AttentionInputs, by_kernels: bool) -> int:
        """An upper bound: kernels take 10 bytes per pair of blocks, and 8 bytes (counted as 16) per key block and last row."""
        if by_kernels:
            q_blocks, kv_blocks = (num_blocks(x.shape[2], self.block_size) for x in (inputs.query, inputs.key))
            return kv_blocks * (q_blocks * 10 + self.block_size * 16)
        return plain_bytes(inputs, self.block_size, 80, 12 if inputs.softcap is None else 18)


hybrid_mask = mask_function("hybrid", Hybrid)
