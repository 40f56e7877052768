"""LM-Infinite's Lambda-shaped mask, in whole blocks."""

from __future__ import annotations

from torch import Tensor

from flexmask.base.options import check_count
from flexmask.method import BlockProblem, method


def _check(global_tokens: int, local_tokens: int, **_: object) -> None:
    check_count("global_tokens", global_tokens, 0, "tokens")
    check_count("local_tokens", local_tokens, 1, "tokens")


@method(check=_check)
def lm_infinite_mask(problem: BlockProblem, global_tokens: int = 10, local_tokens: int = 4096) -> Tensor:
    """LM-Infinite's Lambda-shaped mask without its distance ceiling, the same for every head and input.

    The blocks that hold a pair with ``position - k < local_tokens``, or one of the first `global_tokens` valid keys.

    Source: LM-Infinite (https://arxiv.org/abs/2308.16137), section 4, the Lambda-shaped mask.

    Differs from the paper: the distance ceiling, under which far keys are scored as if `local_tokens` away, is a second set of
    scores and not a mask; it is left out, so that beyond the pretrained length a model sees positions that LM-Infinite spares it.
    Blocks on the border are kept whole: a superset, by less than a block on either side.

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
    global_tokens
        Tokens, >= 0: valid keys at the beginning that every row keeps (the paper's n_global). Default 10 (the published code's).
    local_tokens
        Tokens, >= 1: reach of the window, the row's own position included (the paper's L_pretrain). Default 4096 (the published
        code's for Llama-2).

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
    >>> lm_infinite_mask(query, key, block_size=64, local_tokens=65).to_dense()[0, 0, 4:6]
    tensor([[1, 0, 0, 1, 1, 0, 0, 0],
            [1, 0, 0, 0, 1, 1, 0, 0]], dtype=torch.int32)
    """
    return problem.sinks_of_tokens(global_tokens) | problem.window(local_tokens)
