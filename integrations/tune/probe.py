"""Measures heads while a model runs dense, for `tune`; the gradient of a prompt's loss through activations, not weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexmask._torch import is_in_backward
from flexmask.dense_policy import by_head_dim
from flexmask.flex.dense import dense_attention
from flexmask.integrations.huggingface.call import PrefillCall
from flexmask.integrations.huggingface.compat import input_device
from flexmask.integrations.huggingface.session import Scope, remove_hook
from flexmask.integrations.tune.head_errors import head_errors
from flexmask.integrations.tune.measured import MeasuredErrors

MOST_SCORED = 4096  # tokens: their logits are the largest tensor of a long prompt


class HeadProbe:
    """Serves the calls of one prompt's dense prefill and measures their heads; with `gradient` in `weigh`, after a backward."""

    def __init__(self, measured: MeasuredErrors, prompt: int, advance: Callable[[], None], gradient: bool) -> None:
        self.measured, self.prompt, self.advance, self.gradient = measured, prompt, advance, gradient
        self.called: set[int] = set()  # layers
        self.waiting: dict[int, tuple[PrefillCall, Tensor]] = {}  # outputs without a gradient yet

    def __call__(self, call: PrefillCall) -> Tensor:
        inputs, layer = call.inputs, call.layer
        if layer in self.called:
            if is_in_backward():  # a checkpoint
                return dense_attention(inputs)[0]
            raise NotImplementedError(f"tune does not serve a model that calls attention more than once in layer {layer}")
        self.called.add(layer)
        if inputs.query.shape[2] != inputs.key.shape[2] or inputs.attention_mask is not None or inputs.offset is not None:
            raise NotImplementedError("tune does not serve a model that adds keys to those of its prompt, or hides some")
        assert inputs.value is not None
        reason = by_head_dim(inputs.query.shape[3], inputs.value.shape[3]) or call.reason_dense_layer()
        if reason is not None:
            self.measured.dense[layer] = reason
            self.advance()
        if reason is not None or layer in self.measured.by_prompt[self.prompt]:
            return dense_attention(inputs)[0]
        if not self.gradient:
            return self.note(call)
        out = dense_attention(inputs)[0]
        if not out.requires_grad:
            raise NotImplementedError("tune needs checkpoints with use_reentrant=False: others run forward without a gradient")
        out.retain_grad()
        self.waiting[layer] = call, out
        return out

    def weigh(self) -> None:
        """Measure the layers whose outputs have gradients."""
        for layer in sorted(self.waiting):
            call, out = self.waiting.pop(layer)
            if out.grad is None:
                raise NotImplementedError(f"tune needs a loss that depends on attention; layer {layer} has no gradient")
            self.note(call, out.grad)

    def note(self, call: PrefillCall, gradient: Tensor | None = None) -> Tensor:
        out, errors = head_errors(call.inputs, call.selector, self.measured.gammas, call.settings.max_mask_bytes, gradient)
        if not all(math.isfinite(error) for head in errors.error for error in head):
            raise ValueError(f"model must give finite attention; got NaN or infinity in layer {call.layer}")
        self.measured.by_prompt[self.prompt][call.layer] = errors
        self.measured.save()
        self.advance()
        return out


def backward_through_loss(scope: Scope, prompt: Tensor) -> None:
    """Backpropagate the next-token loss of a prompt, (length,) integer, to tensors with `retain_grad`.

    The loss is summed over T `scored_tokens` and divided by the root of T: for a change d of activations, ``(gradient . d)^2`` is
    the squared change of the summed loss over T.
    """
    # callers may be in inference mode, whose tensors have no gradients
    with torch.inference_mode(False), torch.enable_grad():
        _through_activations(scope)
        prompt = prompt.to(input_device(scope.model)).clone()
        scored = scored_tokens(prompt)
        logits = logits_of(scope.model, prompt, scored)
        loss = F.cross_entropy(logits.float(), prompt[scored + 1].to(logits.device), reduction="sum")
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
