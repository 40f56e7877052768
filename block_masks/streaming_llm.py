"""StreamingLLM: attention sinks and a sliding window, in whole blocks."""

from __future__ import annotations

from torch import Tensor

from flexmask.base.options import check_count
from flexmask.method import BlockProblem, method


def _check(sink_blocks: int, window_blocks: int, **_: object) -> None:
    check_count("sink_blocks", sink_blocks, 0, "blocks")
    check_count("window_blocks", window_blocks, 1, "blocks")


@method(check=_check)
def streaming_llm_mask(problem: BlockProblem, sink_blocks: int = 8, window_blocks: int = 64) -> Tensor:
    """StreamingLLM's sinks and sliding window, the same for every head and input.

    Query block i keeps key block j iff ``j - first < sink_blocks`` or ``i - j < window_blocks``, where i is the block of the
    position and ``first`` the block of the first valid key. So a row sees between ``(window_blocks - 1) * block_size + 1`` and
    ``window_blocks * block_size`` tokens of the window.

    Source: StreamingLLM (https://arxiv.org/abs/2309.17453), section 3.2, as the baseline of FlexPrefill
    (https://arxiv.org/abs/2502.20766), section 4.1.

    Differs from the paper: sinks and window are whole blocks, where the paper has 4 sink tokens; positions are not re-counted
    within the cache, which a mask cannot do: rows and keys keep their distance. With padding on the left, the sinks are the first
    blocks with tokens.

    Parameters
    ----------
    query
        (batch, num_heads, q_len, head_dim), float32, float16 or bfloat16, head_dim 16 to 256, any device; values are not used.
    key
        (batch, num_kv_heads, kv_len, head_dim), the same dtype and device; num_kv_heads divides num_heads and q_len <= kv_len.
    block_size, window, attention_mask, q_offset, return_stats
        As in `flexprefill_mask`.
    scale, softcap
        Checked and not used: positions alone decide. Default None.
    sink_blocks
        Blocks, >= 0, that every row keeps. Default 8: 1024 tokens in blocks of 128 (FlexPrefill's published baseline; its paper
        says 1000 tokens).
    window_blocks
        Blocks, >= 1, up to and with the row's own. Default 64: 8192 tokens in blocks of 128 (as above, 8000 in the paper).

    Returns
    -------
    BlockMask
        Of shape (batch, 1, q_len, kv_len): the heads agree.

    Raises
    ------
    TypeError, ValueError
        For wrong types, shapes, dtypes, devices or ranges. The values of tensors are not read: no host synchronisation.

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> streaming_llm_mask(query, key, block_size=64, sink_blocks=1, window_blocks=2).to_dense()[0, 0, 4:6]
    tensor([[1, 0, 0, 1, 1, 0, 0, 0],
            [1, 0, 0, 0, 1, 1, 0, 0]], dtype=torch.int32)
    """
    return problem.sinks(sink_blocks) | problem.diagonals(window_blocks)
