"""Greedy answers to batches of prompts."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@torch.no_grad()
def greedy(model: PreTrainedModel, token_ids: Tensor, num_answer_tokens: int) -> Tensor:
    """Prefill prompts of one length and decode, (count, num_answer_tokens) int64.

    Parameters
    ----------
    model : PreTrainedModel
    token_ids : Tensor, (count, num_tokens), int64
    num_answer_tokens : int
    """
    cache = DynamicCache(config=model.config)
    step, found = token_ids.to(model.device), []
    for _ in range(num_answer_tokens):
        step = model(input_ids=step, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        found.append(step)
    return torch.cat(found, dim=1)
