"""The model under what users wrap it in, the part that is switched, and what can be refused before it runs."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Pipeline, PreTrainedModel


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model in a pipeline, a compiled module or a PEFT model, in any order of these; itself if it is one.

    Raises
    ------
    TypeError
        Where there is none.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(inner, Pipeline):
            inner = inner.model
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            inner = inner._orig_mod
        elif isinstance(inner, nn.Module) and callable(base := getattr(inner, "get_base_model", None)):
            inner = base()
        else:
            raise TypeError(
                "model must be a transformers PreTrainedModel, or a pipeline, torch.compile's or PEFT's wrapper around one; "
                f"got {type(model).__name__}" + ("" if inner is model else f" around {type(inner).__name__}")
            )
    return inner


def text_config(model: PreTrainedModel) -> Any:
    """The config that a model's attention layers have: its own, or that of its text part."""
    return getattr(model.config, "text_config", model.config)


def check_servable(model: PreTrainedModel) -> None:
    """Refuse what the model itself says about its attention, before anything runs.

    Raises
    ------
    NotImplementedError
        For cross attention, bidirectional and chunked attention, and a config that asks for attention weights.
    """
    name, config = type(model).__name__, text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(name, "an encoder with a decoder, whose cross attention it does not know", "sdpa")
    flags = [
        module.is_causal
        for module in model.modules()
        if isinstance(getattr(module, "is_causal", None), bool) and getattr(module, "config", None) is config
    ]
    if flags and not any(flags):
        raise _refusal(name, "an encoder: every layer's attention is marked as bidirectional", "sdpa")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise _refusal(name, "a model with chunked attention (config.layer_types)", "sdpa")
    if getattr(config, "output_attentions", False):
        raise _refusal(name, "a config with output_attentions", "eager")


def _refusal(name: str, what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f'flexprefill attention does not serve {name}, {what}; use attn_implementation="{instead}"')
