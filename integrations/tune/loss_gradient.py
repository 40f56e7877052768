"""The gradient of a prompt's loss through activations, without those of weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexmask.integrations.huggingface.session import Scope, remove_hook

MOST_SCORED = 4096  # tokens: their logits are the largest tensor of a long prompt


def backward_through_loss(scope: Scope, prompt: Tensor, between: Callable[[], None]) -> None:
    """Backpropagate the next-token loss of a prompt, (length,) integer, to tensors with `retain_grad`.

    The loss is summed over T `scored_tokens` and divided by the root of T: for a change d of activations, ``(gradient . d)^2`` is
    the squared change of the summed loss over T. `between` runs before the backward pass, in which checkpoints run again.
    """
    # callers may be in inference mode, whose tensors have no gradients
    with torch.inference_mode(False), torch.enable_grad():
        _through_activations(scope)
        prompt = prompt.to(scope.model.device).clone()
        scored = scored_tokens(prompt)
        logits = logits_of(scope.model, prompt, scored)
        loss = F.cross_entropy(logits.float(), prompt[scored + 1].to(logits.device), reduction="sum")
        between()
        (loss / len(scored) ** 0.5).backward()


def scored_tokens(prompt: Tensor) -> Tensor:
    """At most `MOST_SCORED` evenly spaced tokens, without the last."""
    length = len(prompt)
    return torch.linspace(0, length - 2, min(length - 1, MOST_SCORED), device=prompt.device).round().long()


def logits_of(model: PreTrainedModel, prompt: Tensor, tokens: Tensor) -> Tensor:
    """Logits of some tokens of a prompt, (tokens, vocab_size)."""
    # indices would stay on the first device of a model that is spread over several
    one_device = len({parameter.device for parameter in model.parameters()}) == 1
    keeps = one_device and "logits_to_keep" in inspect.signature(model.forward).parameters
    logits: Tensor = model(input_ids=prompt[None], use_cache=False, **({"logits_to_keep": tokens} if keeps else {})).logits[0]
    return logits if keeps else logits[tokens.to(logits.device)]


def _through_activations(scope: Scope) -> None:
    """Gradients from the embeddings on, none for weights."""
    with_gradient = [parameter for parameter in scope.model.parameters() if parameter.requires_grad]
    embeddings = scope.model.get_input_embeddings()

    def begin(module: nn.Module, given: Any, out: Tensor) -> None:
        out.requires_grad_()

    def give_back() -> None:
        remove_hook(embeddings, begin)
        for parameter in with_gradient:
            parameter.requires_grad_()

    # noted before anything changes: an interrupt may come in between
    scope.undo.append(give_back)
    for parameter in with_gradient:
        parameter.requires_grad_(False)
    embeddings.register_forward_hook(begin)
