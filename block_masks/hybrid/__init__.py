"""Hybrid: evidence from all query rows, joined with lines of the last rows. The method we recommend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmask._torch import HAS_TRITON
from flexmask.base.checks import check_bool, check_int
from flexmask.base.inputs import AttentionInputs, plain_bytes
from flexmask.base.selection import Choice
from flexmask.base.visibility import num_blocks
from flexmask.block_masks.hybrid import plain
from flexmask.block_masks.hybrid.plain import Rule
from flexmask.method import BlockProblem, ByHead, method

if HAS_TRITON:
    from flexmask.block_masks.hybrid import kernels

RULE = Rule()


def _check(*, block_size: int, row_stride: int, last_rows_dense: object, **_: Any) -> None:
    check_bool("last_rows_dense", last_rows_dense)
    check_int("row_stride", row_stride)
    if not block_size // 32 <= row_stride or row_stride < 1 or block_size % row_stride != 0:
        raise ValueError(f"row_stride must be a divisor of block_size ({block_size}) and at least a 32nd of it; got {row_stride}")


def _head_bytes(inputs: AttentionInputs, block_size: int, by_kernels: bool, **_: Any) -> int:
    """Kernels take 10 bytes per pair of blocks, and 16 per key block and representative row."""
    if by_kernels:
        q_blocks, kv_blocks = (num_blocks(x.shape[2], block_size) for x in (inputs.query, inputs.key))
        return kv_blocks * (q_blocks * 10 + block_size * 16)
    return plain_bytes(inputs, block_size, 80, 12 if inputs.softcap is None else 18)


@method(
    has_kernels=True,
    counts={"min_budget": (0, "tokens")},
    ranges={"min_coverage": "[0, 1]"},
    check=_check,
    keeps_all=lambda gamma, **_: gamma == 1,
    head_bytes=_head_bytes,
)
def hybrid_mask(
    problem: BlockProblem,
    gamma: ByHead = 0.9,
    *,
    min_budget: int = 256,
    row_stride: int = 8,
    min_coverage: float = 0.5,
    last_rows_dense: bool = False,
) -> Choice:
    """Hybrid selection: each query block keeps what its own rows attend to, and lines of the last rows.

    Source: none, it is ours (`docs/design.md`). With n the key blocks that query block r sees, N the largest n of its batch row
    in this call, ``n0 = 16384 / block_size`` and ``e = g min(2, n0/N)``; g is ``1 - gamma``, and with gamma above 0.9 and N above
    n0 ``(1 - gamma) (10 max(1 - gamma, 1e-6))^min(1, log2(N/n0)/2)``. A head keeps in r

    - each key block j with ``R[r, j] >= t[r] = e/5 (N/n max(1, (n0/2n)^3 0.1/g))^p``: R is the root mean square, over
      every `row_stride`-th row of r from its first on, padding left out, of the row's softmax attention to the means of visible
      key blocks, weighted by their number of keys; the power p is ``max(0, 3/5 (1 - n0/N))``;
    - where these hold less than `min_coverage` of the sum of R[r, j] over j, more: t[r] is halved, at most six times, until they
      hold it; of the blocks that the last halving adds the nearest, ``ceil(m f - 1/64)`` of these m, where f is the missing part
      over what all m hold; after six halvings every visible block;
    - each key block to which one of the last `block_size` rows gives ``>= e/2`` of its attention;
    - each block diagonal to which those rows give ``>= e/5`` on average, without those key blocks beyond the nearest ``8 b``;
    - the previous two only where ``R[r, j] >= t[r]/16``, or where r holds one of those rows;
    - the blocks on its nearest ``b = ceil(min_budget / block_size)`` block diagonals, ``8 b`` if it holds one of those rows; each
      row counts diagonals from its own block, the 0th;
    - its first visible key block and its diagonal;
    - with `last_rows_dense`, every visible block if r holds one of those rows.

    While it is made, a mask takes up to 10 bytes per pair of blocks on CUDA, elsewhere 80; statistics take a second pass over the
    evidence.

    Parameters
    ----------
    gamma
        Trades error for speed: thresholds are proportional to g. Range (0, 1]; 1 keeps every visible block. Default 0.9 (ours).
        Per head as in flexprefill.
    min_budget
        Tokens' worth of the nearest blocks that every query block keeps. Range >= 0, default 256 (ours).
    row_stride
        Rows: every row_stride-th of a query block is scored. A divisor of block_size, at least a 32nd of it. Default 8 (ours: 1
        keeps 4% fewer blocks at equal error, for eight times the scores).
    min_coverage
        Least share of its evidence R that each query block keeps. Range [0, 1], default 0.5 (ours; `docs/design.md` has what it
        adds to the blocks of models): heads that attend evenly keep half. 0 computes nothing.
    last_rows_dense
        True if each query block with one of the last `block_size` rows, padding left out, keeps every visible block: one where
        these end with a block, else two; under padding between them more. In chunks these are the chunk's last rows. Other
        query blocks keep the same either way. Default False (ours).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> mask = hybrid_mask(query, key, gamma=0.9, block_size=64, min_budget=128)
    >>> mask.shape
    (1, 4, 512, 512)
    """
    shared, nearest = problem.steps, num_blocks(min_budget, problem.block_size)
    steps: Any = kernels if problem.by_kernels else plain  # the method's own
    least = steps.thresholds(problem, gamma, RULE)

    # the last rows: true attention, and the lines kept of it
    last = shared.representative_mass(problem, "last")
    lines = steps.last_rows_lines(problem, last, least.lines, RULE.nearest * nearest)

    # all rows: attention to key means, and the blocks kept of it
    evidence = steps.row_evidence(problem, row_stride)
    blocks = steps.row_blocks(problem, evidence, least.rows, RULE.lines, min_coverage)

    of_last = num_blocks(problem.inputs.key.shape[2], problem.block_size) if last_rows_dense else RULE.nearest * nearest
    lists, keep = shared.kept_blocks(problem, lines, blocks, last, (nearest, of_last))
    covered: list[Tensor] = []

    def row_coverage(keep: Tensor, which: int) -> Tensor:
        if not covered:
            covered.extend(steps.row_coverage(problem, evidence, keep))
        return covered[which]

    return Choice(
        lists,
        keep,
        {
            "num_vertical_blocks": lambda _: lines[0].sum(-1),
            "num_slash_blocks": lambda _: lines[1].sum(-1),
            "coverage": lambda keep: shared.coverage(problem, last, keep),
            "row_coverage": lambda keep: row_coverage(keep, 0),
            "least_row_coverage": lambda keep: row_coverage(keep, 1),
        },
    )
