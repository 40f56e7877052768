"""Measures heads while a model runs dense, for `tune`."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from flexmask.dense_policy import by_head_dim
from flexmask.flex.dense import dense_attention
from flexmask.integrations.huggingface.call import PrefillCall
from flexmask.integrations.tune.head_errors import head_errors
from flexmask.integrations.tune.measured import MeasuredErrors


class HeadProbe:
    """Serves the calls of dense prefills and measures their heads; with `gradient` after the backward pass, in `weigh`."""

    def __init__(self, measured: MeasuredErrors, advance: Callable[[], None], gradient: bool) -> None:
        self.measured, self.advance, self.gradient = measured, advance, gradient
        self.begin(0)

    def begin(self, prompt: int) -> None:
        self.prompt, self.in_backward = prompt, False
        self.called: set[int] = set()  # layers
        self.waiting: dict[int, tuple[PrefillCall, Tensor]] = {}  # outputs without a gradient yet

    def begin_backward(self) -> None:
        """Expect repeated calls of layers, by checkpoints."""
        self.in_backward = True

    def __call__(self, call: PrefillCall) -> Tensor:
        inputs, layer = call.inputs, call.layer
        if layer in self.called:
            if self.in_backward:  # a checkpoint
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
