"""Queries, keys and values captured from the trained retriever while it reads a prompt with needles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODEL = Path(__file__).parent / "retriever" / "model"
LAYERS = (0, 1, 2, 3)
_NAME = "flexmask_bench_captured"
_NEEDLES = 16

# by layer, of the prefill that is running
_CALLS: dict[int, tuple[Tensor, Tensor, Tensor]] = {}


def retriever_prompt(
    length: int,
    *,
    layers: Sequence[int] = LAYERS,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    seed: int = 0,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as the retriever's layers hand them to attention, side by side as heads.

    The model has four layers of 8 heads and 2 key-value heads: all of them are as many as Llama-3.1-8B has in one layer. Fewer
    layers are repeated until there are enough heads. head_dim stays the model's 64.

    Parameters
    ----------
    length
        Tokens of the prompt: 16 needles in a haystack (fewer where they do not fit), and a question at the end.
    layers
        Whose heads to take. Layers 1 and 2 attend to few keys, 0 and 3 to many (`bench/retriever/README.md`).
    num_heads, num_kv_heads
        Of the result; multiples of the model's 8 and 2, in the same proportion.
    seed
        Of the prompt.
    device, dtype
        To run the model on and in.
    """
    from bench.retriever.task import make_prompt

    model = _model(device, dtype)
    prompt = make_prompt(length, min(_NEEDLES, (length - 3) // 24), seed=seed)
    _CALLS.clear()
    with torch.no_grad():
        model(input_ids=prompt.token_ids.to(device)[None], use_cache=False, logits_to_keep=1)
    chosen = [_CALLS[layer] for layer in layers]
    _CALLS.clear()

    def side_by_side(which: int, heads: int) -> Tensor:
        joined = torch.cat([layer[which] for layer in chosen], dim=1)
        if heads % joined.shape[1]:
            raise ValueError(f"{heads} heads are no multiple of the {joined.shape[1]} that {len(layers)} layers have")
        return joined.repeat(1, heads // joined.shape[1], 1, 1)

    return side_by_side(0, num_heads), side_by_side(1, num_kv_heads), side_by_side(2, num_kv_heads)


def _capture(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Dense causal attention that keeps what it was given; an attention implementation of transformers."""
    index = module.layer_idx
    assert isinstance(index, int)
    _CALLS[index] = (query, key, value)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


@cache
def _model(device: str, dtype: torch.dtype) -> Any:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    AttentionInterface.register(_NAME, _capture)
    # one unpadded row: causality is all there is to say
    AttentionMaskInterface.register(_NAME, lambda *arguments, **options: None)
    loaded: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, attn_implementation=_NAME, local_files_only=True)
    return loaded.to(device).eval()
