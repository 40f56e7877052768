"""Sparse prefill as an attention kernel of transformers' hub interface. The package flexmask must be installed."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

try:
    from flexmask import sparse_attention
except ImportError as error:
    raise ImportError("this kernel calls the package flexmask, which is not installed: pip install flexmask") from error

supports_flash_attn = True


def flash_attn_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: sparse for prompts from 16,384 tokens, by ``hybrid`` with its default options, else dense.

    Decoding, one row per prompt, runs SDPA, under a mask if there is one. A prefill takes no mask: transformers passes padding, and
    the positions of later chunks, as a dense one, which hides what flexmask has to know.

    Parameters
    ----------
    module, dropout, scaling, sliding_window, softcap, is_causal, s_aux
        As transformers passes them; `module` is the attention layer.
    query, key, value
        (batch, num_heads or num_kv_heads, q_len or kv_len, head_dim).
    attention_mask
        None, or in decoding (batch or 1, 1 or num_heads, 1, kv_len).

    Returns
    -------
    tuple
        (batch, q_len, num_heads, head_dim), and None for the weights.

    Raises
    ------
    NotImplementedError
        For dropout, attention that is not causal, packed prompts, and masks in a prefill.
    """
    if dropout != 0:
        raise NotImplementedError(f"flexmask has no dropout; call model.eval(); got dropout {dropout}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal and query.shape[2] > 1:
        raise NotImplementedError("flexmask serves causal attention; this layer's is not")
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"this kernel takes no packed prompts; got {name}; use flexmask.sparse_prefill(model)")
    if query.shape[2] == 1 and softcap is None and s_aux is None and (sliding_window is None or attention_mask is not None):
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous(), None
    if attention_mask is not None:
        raise NotImplementedError(
            "this kernel takes no dense attention mask, as transformers makes of padding, later chunks, windows and static caches: "
            "pass prompts of one length without padding and whole, or use flexmask.sparse_prefill(model), which serves all of them"
        )
    attend: Any = sparse_attention
    out = attend(query, key, value, scale=scaling, softcap=softcap, window=sliding_window, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None


__all__ = ["flash_attn_forward", "supports_flash_attn"]
