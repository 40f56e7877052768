"""Dense causal attention as a block mask: every block that holds a visible key, with padding, window and chunk offset."""

from __future__ import annotations

from flexmask.method import BlockProblem, method


@method
def causal_mask(problem: BlockProblem) -> None:
    """The mask of dense causal attention, the same for every head.

    Row t of the queries stands at position ``q_offset + t`` and sees the keys at ``0 <= position - k < window`` that are tokens,
    not padding. Every other mask here is a subset, and is compared with it. It is found block by block: no map of query rows
    by keys is ever made.

    Parameters
    ----------
    query
        (batch, num_heads, q_len, head_dim), float32, float16 or bfloat16, head_dim 16 to 256, any device; values are not used.
    key
        (batch, num_kv_heads, kv_len, head_dim), the same dtype and device; num_kv_heads divides num_heads and q_len <= kv_len.
        Lengths need not be multiples of the block.
    block_size
        Tokens in a block, of queries and of keys alike: a multiple of 16 from 16 to 256, default 128 (FlexAttention's own).
    scale, softcap
        Checked and not used: visibility alone decides. Default None.
    window
        Tokens, >= 1: a row sees itself and the ``window - 1`` positions before it. Default None: all before it.
    attention_mask
        (batch, kv_len), bool or integer, nonzero = token, on key's device; padded rows attend to nothing. Default None: all
        tokens.
    q_offset
        Position of query row 0, in [0, kv_len - q_len]: an int (checked) or an integer tensor, 0-d or (batch,), on the same
        device (clamped there). Default None: kv_len - q_len, so that the last row stands at the last key.
    return_stats
        As in `flexprefill_mask`.

    Returns
    -------
    BlockMask
        Of shape (batch, 1, q_len, kv_len): the heads agree. Blocks without a hidden pair are in the full list, the others, if
        they hold a visible pair, in the partial list; the mask_mod says the same without the lists.

    Raises
    ------
    TypeError, ValueError
        For wrong types, shapes, dtypes, devices or ranges. The values of tensors are not read: no host synchronisation.

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
