"""MoA: a window whose length differs per head, by a plan."""

from __future__ import annotations

from torch import Tensor

from flexmask.method import BlockProblem, PairsByHead, method

# ours, not MoA's: heads take spans of an eighth, a quarter, a half and all of the prompt in turn
STAND_IN_PLAN = ((0.0, 0.125), (0.0, 0.25), (0.0, 0.5), (0.0, 1.0))


def stand_in_plan(num_heads: int) -> tuple[tuple[float, float], ...]:
    """A plan of ours for `num_heads` heads without a calibrated one."""
    return tuple(STAND_IN_PLAN[head % len(STAND_IN_PLAN)] for head in range(num_heads))


@method(counts={"sink_blocks": (0, "blocks")}, plans={"plan": stand_in_plan})
def moa_mask(problem: BlockProblem, plan: PairsByHead | None = None, sink_blocks: int = 1) -> Tensor:
    """MoA's elastic windows: a span per head that grows with the length, the same for every input.

    With n blocks filled so far, a head of plan (alpha, beta) keeps key block j iff ``j - first < sink_blocks`` or
    ``i - j < max(1, floor(alpha / block_size + beta * n))``; ``first`` is the block of the first valid key.

    Source: MoA (https://arxiv.org/abs/2406.14909), section 3, elastic rules of the heterogeneous attention span.

    Differs from the paper: plans are calibrated per model and published for a few; the default is ours (`STAND_IN_PLAN`) and says
    nothing about MoA. Spans and sinks are in blocks of block_size, in the published code of 64.

    The other parameters, the result and the errors are those of `flexprefill_mask`.
    Only the shapes of query and key are read; scale and softcap are checked.

    Parameters
    ----------
    plan
        (alpha, beta), each >= 0: alpha in tokens, beta as a share of the length; a pair for all heads or one per query head.
        Default None: `stand_in_plan`.
    sink_blocks
        Blocks, >= 0, that every row keeps. Default 1 (published code).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> moa_mask(query, key, block_size=64, plan=(64, 0.125)).to_dense()[0, 0, 4:6]
    tensor([[1, 0, 0, 1, 1, 0, 0, 0],
            [1, 0, 0, 0, 1, 1, 0, 0]], dtype=torch.int32)
    """
    tokens, size = problem.tokens, problem.block_size
    pairs = problem.as_tensor(plan)  # (num_heads or 1, 2)
    filled = tokens.offset + tokens.row_valid.shape[1]  # (batch or 1,)
    blocks = ((filled + size - 1) // size)[:, None, None, None]
    alpha, beta = pairs[:, 0, None, None], pairs[:, 1, None, None]
    return problem.sinks(sink_blocks) | problem.diagonals((alpha / size + beta * blocks).floor().clamp(min=1))
