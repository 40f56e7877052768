"""Prefill and greedy decoding of causal models."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaForCausalLM

# the argument of a model's call, renamed in transformers 5.24
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


@torch.no_grad()
def prefill(model: Any, token_ids: Tensor, chunk: int | None = None) -> tuple[Tensor, Cache]:
    """Logits after each prompt (batch, vocab_size), and the cache, of prompts (batch, num_tokens) at once or in chunks."""
    cache = DynamicCache(config=model.config)
    for part in token_ids.to(model.device).split(chunk or token_ids.shape[1], 1):
        logits = model(input_ids=part, logits_to_keep=1, **{CACHE: cache}).logits
    return logits[:, -1], cache


@torch.no_grad()
def decode(model: Any, logits: Tensor, cache: Cache, count: int) -> Tensor:
    """Greedy tokens after `prefill`, (batch, count) int64."""
    tokens = [logits.argmax(-1)]
    while len(tokens) < count:
        logits = model(input_ids=tokens[-1][:, None], **{CACHE: cache}).logits[:, -1]
        tokens.append(logits.argmax(-1))
    return torch.stack(tokens, 1)
