"""Log-probabilities of a prompt's tokens under a model, for ``flexmask gain``."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

MOST_SCORED = 4096  # tokens: their logits are the largest tensor of a long prompt
_AT_ONCE = 256  # log-probabilities at a time in float32


def log_probs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probabilities of up to `MOST_SCORED` evenly spaced tokens of a prompt, (1, length), float32 on the CPU."""
    length = ids.shape[1]
    before = torch.linspace(0, length - 2, min(length - 1, MOST_SCORED), device=ids.device).round().long()
    logits = logits_of(model, ids, before)
    targets = ids[0, before + 1].to(logits.device)
    parts = zip(logits.split(_AT_ONCE), targets.split(_AT_ONCE), strict=True)
    return torch.cat([-F.cross_entropy(part.float(), target, reduction="none") for part, target in parts]).cpu()


def logits_of(model: PreTrainedModel, ids: Tensor, tokens: Tensor) -> Tensor:
    """Logits of some tokens of a prompt, (1, length): (tokens, vocab_size)."""
    # indices would stay on the first device of a model that is spread over several
    one_device = len({parameter.device for parameter in model.parameters()}) == 1
    keeps = one_device and "logits_to_keep" in inspect.signature(model.forward).parameters
    logits: Tensor = model(input_ids=ids, use_cache=False, **({"logits_to_keep": tokens} if keeps else {})).logits[0]
    return logits if keeps else logits[tokens.to(logits.device)]
