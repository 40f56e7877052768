"""Dense causal attention as a block mask."""

from __future__ import annotations

from flexmask.method import BlockProblem, method


@method
def causal_mask(problem: BlockProblem) -> None:
    """The mask of dense causal attention, the same for every head.

    Row t stands at position ``q_offset + t`` and sees the valid keys with ``0 <= position - k < window``. Every other mask is a
    subset.

    The other parameters, the result and the errors are those of `flexprefill_mask`.
    Only the shapes of query and key are read; scale and softcap are checked. All heads share one mask.

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
