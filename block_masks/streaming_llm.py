"""StreamingLLM: attention sinks and a sliding window, in whole blocks."""

from __future__ import annotations

from torch import Tensor

from flexmask.method import BlockProblem, method


@method(counts={"sink_blocks": (0, "blocks"), "window_blocks": (1, "blocks")})
def streaming_llm_mask(problem: BlockProblem, sink_blocks: int = 8, window_blocks: int = 64) -> Tensor:
    """StreamingLLM's sinks and sliding window, the same for every head and input.

    Query block i keeps key block j iff ``j - first < sink_blocks`` or ``i - j < window_blocks``, where i is the block of the
    position and ``first`` the block of the first valid key.

    Source: StreamingLLM (https://arxiv.org/abs/2309.17453), section 3.2, as the baseline of FlexPrefill
    (https://arxiv.org/abs/2502.20766), section 4.1.

    Differs from the paper: whole blocks, where the paper has 4 sink tokens; positions are not re-counted within the cache, which
    a mask cannot do.

    The other parameters, the result and the errors are those of `flexprefill_mask`.
    Only the shapes of query and key are read; scale and softcap are checked. All heads share one mask.

    Parameters
    ----------
    sink_blocks
        Blocks, >= 0, that every row keeps. Default 8 (1024 tokens in blocks of 128: FlexPrefill's published baseline; 1000 in its
        paper).
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
    return problem.sinks(sink_blocks) | problem.diagonals(window_blocks)
