"""Tri-shape: sinks, a sliding window and the last rows in full."""

from __future__ import annotations

from torch import Tensor

from flexmask.method import BlockProblem, method


@method(counts={"sink_blocks": (0, "blocks"), "window_blocks": (1, "blocks"), "last_blocks": (0, "blocks")})
def tri_shape_mask(problem: BlockProblem, sink_blocks: int = 1, window_blocks: int = 4, last_blocks: int = 1) -> Tensor:
    """The triangle mask: sinks, a sliding window, and the last rows in full; the same for every head.

    Query block i keeps key block j iff ``j - first < sink_blocks`` or ``i - j < window_blocks`` or i is one of the last
    `last_blocks` query blocks with a valid row; ``first`` is the block of the first valid key.

    Source: TriangleMix (https://arxiv.org/abs/2507.21526), section 3, and the tri-shape of SCBench
    (https://arxiv.org/abs/2412.10319).

    Differs from the paper: whole blocks, where the published code has 8 sink tokens, a window of 512 and 100 last rows. Layers
    that the paper leaves dense (0 to 15 of Llama-3.1-8B in its code) go into the adapter's ``dense_layers``. In a
    chunk the last rows are those of the chunk.

    The other parameters, the result and the errors are those of `flexprefill_mask`.
    Only the shapes of query and key are read; scale and softcap are checked. All heads share one mask.

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
    return problem.sinks(sink_blocks) | problem.diagonals(window_blocks) | problem.last_query_blocks(last_blocks)
