"""LM-Infinite's Lambda-shaped mask, in whole blocks."""

from __future__ import annotations

from torch import Tensor

from flexmask.method import BlockProblem, method


@method(counts={"global_tokens": (0, "tokens"), "local_tokens": (1, "tokens")})
def lm_infinite_mask(problem: BlockProblem, global_tokens: int = 10, local_tokens: int = 4096) -> Tensor:
    """LM-Infinite's Lambda-shaped mask without its distance ceiling, the same for every head and input.

    Keeps the blocks that hold a pair with ``position - k < local_tokens``, or one of the first `global_tokens` valid keys.

    Source: LM-Infinite (https://arxiv.org/abs/2308.16137), section 4, the Lambda-shaped mask.

    Differs from the paper: the distance ceiling, which scores far keys as if `local_tokens` away, is no mask and is left out, so
    beyond the pretrained length a model sees unseen distances. Blocks on the border are kept whole.

    The other parameters, the result and the errors are those of `flexprefill_mask`.
    Only the shapes of query and key are read; scale and softcap are checked. All heads share one mask.

    Parameters
    ----------
    global_tokens
        Tokens, >= 0: valid keys at the beginning that every row keeps (the paper's n_global). Default 10 (published code).
    local_tokens
        Tokens, >= 1: reach of the window, the row's own position included (the paper's L_pretrain). Default 4096 (published code
        for Llama-2).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> lm_infinite_mask(query, key, block_size=64, local_tokens=65).to_dense()[0, 0, 4:6]
    tensor([[1, 0, 0, 1, 1, 0, 0, 0],
            [1, 0, 0, 0, 1, 1, 0, 0]], dtype=torch.int32)
    """
    return problem.sinks_of_tokens(global_tokens) | problem.window(local_tokens)
