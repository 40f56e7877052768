"""Query, key and value of the retriever's layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.prompts.structured import Tensors

MODEL = Path(__file__).parents[1] / "retriever" / "model"
LAYERS = (0, 1, 2, 3)
_NAME = "flexmask_bench_captured"
_NEEDLES = 16

# by layer, of the running prefill
_CALLS: dict[int, Tensors] = {}


def retriever_prompt(
    length: int,
    *,
    layers: Sequence[int] = LAYERS,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    seed: int = 0,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensors:
    """Capture query, key and value of `layers` and stack them as heads, repeated to `num_heads` and `num_kv_heads`.

    Parameters
    ----------
    length
        Tokens of the prompt: up to 16 needles and a question.
    layers
        Layers of 8 query and 2 key-value heads each, head_dim 64; all four have the head counts of Llama-3.1-8B. Layers 1 and 2
        are sparse, 0 and 3 broad.
    num_heads, num_kv_heads
        Multiples of what `layers` have, in the same proportion; else ValueError.
    """
    from bench.retriever.task import make_prompt

    model = _model(device, dtype)
    prompt = make_prompt(length, min(_NEEDLES, (length - 3) // 24), seed=seed)
    _CALLS.clear()
    with torch.no_grad():
        model(input_ids=prompt.token_ids.to(device)[None], use_cache=False, logits_to_keep=1)
    chosen = [_CALLS[layer] for layer in layers]
    _CALLS.clear()

    def stacked(which: int, heads: int) -> Tensor:
        joined = torch.cat([layer[which] for layer in chosen], dim=1)
        if heads % joined.shape[1]:
            raise ValueError(f"{heads} heads are no multiple of the {joined.shape[1]} that {len(layers)} layers have")
        return joined.repeat(1, heads // joined.shape[1], 1, 1)

    return stacked(0, num_heads), stacked(1, num_kv_heads), stacked(2, num_kv_heads)


def _capture(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Dense causal attention that keeps its inputs."""
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
    # one unpadded row needs no mask beyond causality
    AttentionMaskInterface.register(_NAME, lambda *arguments, **options: None)
    loaded: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, attn_implementation=_NAME, local_files_only=True)
    return loaded.to(device).eval()
