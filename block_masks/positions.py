"""Masks that only positions decide: dense attention, sinks and windows.

Only the shapes of query and key are read; scale and softcap are checked. All heads share one mask, but for `moa_mask`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from torch import Tensor

from flexmask.mask_function import BlockProblem, PairsByHead, count_option, method


@method
def causal_mask(problem: BlockProblem) -> None:
    """The mask of dense causal attention, the same for every head.

    Row t stands at position ``q_offset + t`` and sees the valid keys with ``0 <= position - k < window``. Every other mask is a
    subset. The other parameters, the result and the errors are as in `flexprefill_mask`.

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> causal_mask(query, key, block_size=64).to_dense()[0, 0, :3]
    tensor([[1, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0, 0]], dtype=torch.int32)
    """
    return None


@method
def lm_infinite_mask(
    problem: BlockProblem, global_tokens: int = count_option(10, 0, "tokens"), local_tokens: int = count_option(4096, 1, "tokens")
) -> Tensor:
    """LM-Infinite's Lambda-shaped mask without its distance ceiling, the same for every head and input.

    Keeps the blocks that hold a pair with ``position - k < local_tokens``, or one of the first `global_tokens` valid keys.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: LM-Infinite (https://arxiv.org/abs/2308.16137), section 4, the Lambda-shaped mask.

    Differs from the paper: the distance ceiling, which scores far keys as if `local_tokens` away, is no mask, so beyond the
    pretrained length a model sees unseen distances. Blocks on the border are kept whole.

    Parameters
    ----------
    global_tokens
        Tokens, >= 0: valid keys at the beginning that every row keeps (the paper's n_global). Default 10 (published code).
    local_tokens
        Tokens, >= 1: window, the row's own position included (the paper's L_pretrain). Default 4096 (published for Llama-2).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> lm_infinite_mask(query, key, block_size=64, local_tokens=65).to_dense()[0, 0, 4:6]
    tensor([[1, 0, 0, 1, 1, 0, 0, 0],
            [1, 0, 0, 0, 1, 1, 0, 0]], dtype=torch.int32)
    """
    return problem.blocks_of_first_tokens(global_tokens) | problem.blocks_within(local_tokens)


def stand_in_plan(num_heads: int) -> tuple[tuple[float, float], ...]:
    """A plan of ours, not MoA's: heads take spans of an eighth, a quarter, a half and all of the prompt in turn."""
    return tuple((0.0, (0.125, 0.25, 0.5, 1.0)[head % 4]) for head in range(num_heads))


_PLAN: Any = field(default=None, metadata={"default_by_heads": stand_in_plan})


@method
def moa_mask(problem: BlockProblem, plan: PairsByHead | None = _PLAN, sink_blocks: int = count_option(1)) -> Tensor:
    """MoA's elastic windows: a span per head that grows with the length, the same for every input.

    With n blocks from that of the first valid key, ``first``, to that of the last, a head of plan (alpha, beta) keeps key block j
    iff ``j - first < sink_blocks`` or ``i - j < max(1, floor(alpha / block_size + beta * n))``.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: MoA (https://arxiv.org/abs/2406.14909), section 3, elastic rules of the heterogeneous attention span.

    Differs from the paper: plans are calibrated per model and published for a few; the default is ours (`stand_in_plan`) and says
    nothing about MoA. Spans and sinks are in blocks of block_size, in the published code of 64.

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
    pairs = problem.as_tensor(plan)  # (num_heads or 1, 2)
    last_key = problem.last_keys().amax(-1)[:, None, None, None]
    blocks = last_key // problem.block_size - problem.first_block() + 1
    alpha, beta = pairs[:, 0, None, None], pairs[:, 1, None, None]
    spans = (alpha / problem.block_size + beta * blocks).floor().clamp(min=1)
    return problem.first_blocks(sink_blocks) | problem.nearest_diagonals(spans)


@method
def streaming_llm_mask(
    problem: BlockProblem, sink_blocks: int = count_option(8), window_blocks: int = count_option(64, 1)
) -> Tensor:
    """StreamingLLM's sinks and sliding window, the same for every head and input.

    Query block i keeps key block j iff ``j - first < sink_blocks`` or ``i - j < window_blocks``, where i is the block of the
    position and ``first`` the block of the first valid key.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: StreamingLLM (https://arxiv.org/abs/2309.17453), section 3.2, as the baseline of FlexPrefill
    (https://arxiv.org/abs/2502.20766), section 4.1.

    Differs from the paper: whole blocks, where the paper has 4 sink tokens; positions are not re-counted within the cache, which
    a mask cannot do.

    Parameters
    ----------
    sink_blocks
        Blocks, >= 0. Default 8 (1024 tokens in blocks of 128: FlexPrefill's published baseline; 1000 in its paper).
    window_blocks
        Blocks, >= 1, the row's own included. Default 64 (8192 tokens, as above; 8000 in the paper).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> streaming_llm_mask(query, key, block_size=64, sink_blocks=1, window_blocks=2).to_dense()[0, 0, 4:6]
    tensor([[1, 0, 0, 1, 1, 0, 0, 0],
            [1, 0, 0, 0, 1, 1, 0, 0]], dtype=torch.int32)
    """
    return problem.first_blocks(sink_blocks) | problem.nearest_diagonals(window_blocks)


@method
def tri_shape_mask(
    problem: BlockProblem,
    sink_blocks: int = count_option(1),
    window_blocks: int = count_option(4, 1),
    last_blocks: int = count_option(1),
) -> Tensor:
    """The triangle mask: sinks, a sliding window, and the last rows in full; the same for every head.

    Query block i keeps key block j iff ``j - first < sink_blocks`` or ``i - j < window_blocks`` or i is one of the last
    `last_blocks` query blocks with a valid row; ``first`` is the block of the first valid key.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: TriangleMix (https://arxiv.org/abs/2507.21526), section 3, and the tri-shape of SCBench
    (https://arxiv.org/abs/2412.10319).

    Differs from the paper: whole blocks, where the published code has 8 sink tokens, a window of 512 and 100 last rows. Layers
    that the paper leaves dense (0 to 15 of Llama-3.1-8B) go into the adapter's ``dense_layers``. In a chunk the last rows are
    the chunk's.

    Parameters
    ----------
    sink_blocks
        Blocks, >= 0, that every row keeps. Default 1 (the published 8 tokens, rounded up).
    window_blocks
        Blocks, >= 1, the row's own included. Default 4 (512 tokens in blocks of 128, published code).
    last_blocks
        Query blocks, >= 0, that keep every visible block. Default 1 (the published 100 rows, rounded up).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> tri_shape_mask(query, key, block_size=64, window_blocks=2).to_dense()[0, 0, 6:]
    tensor([[1, 0, 0, 0, 0, 1, 1, 0],
            [1, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    return problem.first_blocks(sink_blocks) | problem.nearest_diagonals(window_blocks) | problem.last_query_blocks(last_blocks)
