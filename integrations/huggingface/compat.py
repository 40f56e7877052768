"""Differences between releases of transformers and between models: wrappers, configs, early refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import Pipeline, PreTrainedModel, masking_utils
from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_overlay
from transformers.masking_utils import sliding_window_causal_mask_function as window_function

from flexmask._torch import is_traced

_Value = TypeVar("_Value")
_HEADS = ("num_heads", "num_attention_heads", "num_q_heads", "n_heads", "n_head")  # attributes of attention modules
_POSITIONS = re.compile("^wpe$|position|pos_emb")  # names of tables
_AND, _OR = and_masks().__code__, or_masks().__code__

NAME = "flexmask"  # the name of the attention in transformers
SDPA, EAGER = 'attn_implementation="sdpa"', 'attn_implementation="eager"'
# wraps the mask of packed sequences in newer releases
remap_positions = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
# joins groups of tokens that see one another, such as an image's tokens; older releases lack the function
group_function = getattr(masking_utils, "blockwise_overlay", None)
MODELS_MAKE_4D_MASKS = transformers.__version__.startswith("4.")  # some models build 4-D masks that bypass the mask interface


def refusal(feature: str, alternative: str) -> NotImplementedError:
    return NotImplementedError(f"flexmask does not support {feature}; use {alternative}")


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model inside pipelines, compiled modules and PEFT models; TypeError without one."""
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
    """The config that the attention layers of the text model have."""
    try:
        return model.config.get_text_config()
    except ValueError:  # the model has several, such as an encoder's and a decoder's
        return getattr(model.config, "text_config", model.config)


def text_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """The outermost part with the `text_config`, without encoders of images and sounds; None if no model of its own has it."""
    config = text_config(model)
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return next((part for part in parts if part.config is config), None)


def text_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the text model, without parts that have a config of their own."""
    config, other_prefix = text_config(model), "\0"
    for name, module in (text_model(model) or model).named_modules():
        if isinstance(module, PreTrainedModel) and module.config is not config:
            other_prefix = f"{name}."
        elif not name.startswith(other_prefix):
            yield name, module


def heads_of_layers(model: PreTrainedModel) -> dict[int, int]:
    """Query heads by layer, of the attention modules that have an attribute for their number."""
    heads = {}
    for _, module in text_modules(model):
        layer = getattr(module, "layer_idx", None)
        # other mixers have heads too, but no is_causal
        if isinstance(layer, int) and isinstance(getattr(module, "is_causal", None), bool):
            num_heads = next((n for name in _HEADS if isinstance(n := getattr(module, name, None), int)), None)
            if num_heads is not None:
                heads[layer] = num_heads
    return heads


def learned_positions(model: PreTrainedModel) -> int | None:
    """Length of the longest prompt for which the model's tables have positions; None if it has no such table."""
    tables = []
    for name, module in text_modules(model):
        if isinstance(module, nn.Embedding) and _POSITIONS.search(name.rpartition(".")[2]):
            first = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            tables.append(module.num_embeddings - first)
        # sines and cosines by position
        tables += [len(table) for buffer, table in module.named_buffers(recurse=False) if buffer == "embed_positions"]
    return min(tables, default=None)


def input_device(model: PreTrainedModel) -> torch.device:
    """The device of a model's inputs: that of its embeddings, also while accelerate keeps their weights elsewhere."""
    embeddings = model.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None)
    for part in (hook, *getattr(hook, "hooks", ())):
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    weight = next(embeddings.parameters(), None)
    return model.device if weight is None else weight.device


def check_servable(model: PreTrainedModel) -> None:
    """Raise NotImplementedError for models with cross, bidirectional or chunked attention or with output_attentions."""
    name, config = type(model).__name__, text_config(model)
    if getattr(model.config, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise refusal(f"{name}, an encoder with a decoder, whose cross attention it does not know", SDPA)
    flags = [
        module.is_causal
        for module in model.modules()
        if isinstance(getattr(module, "is_causal", None), bool) and getattr(module, "config", None) is config
    ]
    if flags and not any(flags):
        raise refusal(f"{name}, an encoder: every layer's attention is marked as bidirectional", SDPA)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise refusal(f"{name}, a model with chunked attention (config.layer_types)", SDPA)
    if getattr(config, "output_attentions", False):
        raise refusal(f"{name}, a config with output_attentions", EAGER)


def q_len_and_offset(arguments: dict[str, Any]) -> tuple[int, int | Tensor]:
    """Number of query rows, and the position of the first, cloned since the cache may advance its own before attention."""
    positions = arguments.get("cache_position")  # before transformers 5.4
    if positions is None:
        length, offset = arguments["q_length"], arguments["q_offset"]
    else:
        length, offset = positions.shape[0], positions[0]
    return length, offset.clone() if isinstance(offset, Tensor) else offset


def classify_mask_function(mask_function: Callable[..., Any], local_size: int | None) -> tuple[bool, int | None, Tensor | None]:
    """Return whether a mask is plain causality of single or packed prompts, its window, and the ids of packed sequences.

    Compares the code of `mask_function` with what transformers builds. Ids, (batch or 1, q_len), come without a cache and an
    attention_mask; before release 5 also for a single prompt, all equal. Outside of a compilation the ids of images are read:
    for a text a multimodal model's mask is plain.
    """
    if group_function is not None and not is_traced():
        mask_function = _without_groups(mask_function)
    tensors = _find_captured(mask_function, Tensor)
    for window, prompt_function in _single_prompt_masks(mask_function, local_size):
        if _is_same(mask_function, prompt_function):
            return True, window, None
        for ids in tensors:
            pack_function = masking_utils.packed_sequence_mask_function(ids)
            pairs = [(prompt_function, pack_function)]
            if remap_positions is not None:
                remapped_functions = [remap_positions(prompt_function, positions) for positions in tensors]
                # transformers 5.24 changed the order
                pairs += [
                    pair for remapped in remapped_functions for pair in ((pack_function, remapped), (remapped, pack_function))
                ]
            if any(_is_same(mask_function, and_masks(*pair)) for pair in pairs):
                return True, window, ids
    return False, None, None


def _single_prompt_masks(
    mask_function: Callable[..., Any], local_size: int | None
) -> list[tuple[int | None, Callable[..., Any]]]:
    """Windows and mask functions of single prompts, one of which `mask_function` may be."""
    if local_size is not None:
        return [(local_size, window_function(local_size))]
    # Gemma 3 and 4 build their own window masks, for images
    windows = _find_captured(mask_function, int)
    window_functions = [(window, and_masks(causal_mask_function, sliding_window_overlay(window))) for window in windows]
    return [(None, causal_mask_function), *window_functions]


def _without_groups(mask_function: Callable[..., Any]) -> Callable[..., Any]:
    """`mask_function` without the parts that join groups of tokens, if their ids name no group."""
    captured_values, code = _closure_values(mask_function), getattr(mask_function, "__code__", None)
    if code not in (_OR, _AND) or len(captured_values) != 1:
        return mask_function
    parts = [_without_groups(part) for part in captured_values[0]]
    if code is _AND:
        return and_masks(*parts)
    first, *other_parts = parts
    return first if all(map(_joins_no_group, other_parts)) else mask_function


def _joins_no_group(mask_function: Callable[..., Any]) -> bool:
    """True if a function joins groups of tokens, and its ids name no group."""
    assert group_function is not None
    # -1: no group
    return any(
        _is_same(mask_function, group_function(ids)) and not bool((ids >= 0).any())
        for ids in _find_captured(mask_function, Tensor)
    )


def _is_same(left: Any, right: Any) -> bool:
    """True if two functions have the same code and, recursively, captured values; tensors compare by identity."""
    if left is right:
        return True
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if callable(left) and callable(right):
        code = getattr(left, "__code__", None)
        is_same_code = code is not None and code is getattr(right, "__code__", None)
        return is_same_code and _is_same(_closure_values(left), _closure_values(right))
    return isinstance(left, int) and isinstance(right, int) and left == right


def _find_captured(value: Any, value_type: type[_Value]) -> list[_Value]:
    """Values of a type that a function captures, also by the functions that it captures."""
    if isinstance(value, value_type):
        return [value]
    parts = value if isinstance(value, tuple) else _closure_values(value) if callable(value) else ()
    return [captured for part in parts for captured in _find_captured(part, value_type)]


def _closure_values(function: Any) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
