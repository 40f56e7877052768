"""The attention function for transformers: checks a call's arguments, mask and tensors, and runs it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flexmask._torch import is_traced
from flexmask.base.checks import HEAD_DIMS
from flexmask.base.inputs import AttentionInputs, attention_inputs, without_autocast
from flexmask.flex.dense import attention_to_visible, dense_attention
from flexmask.integrations.huggingface.call import layer_attention
from flexmask.integrations.huggingface.compat import EAGER, MODELS_MAKE_4D_MASKS, SDPA, refusal
from flexmask.integrations.huggingface.mask import GeometryMask
from flexmask.integrations.huggingface.packed import Segments
from flexmask.integrations.huggingface.scope import restore_attention_name

_UNPACK = "one prompt per batch row, or pass use_cache=False and no attention_mask"
_UNPACK_OR_BOUNDS = f"{_UNPACK}; GPT-OSS and AFMoE need cu_seq_lens_q and cu_seq_lens_k without position_ids"
# arguments that change attention, and what to use instead; all others are the model's own (labels, lengths, flags)
_REFUSED = {
    **dict.fromkeys(("position_bias", "attention_bias", "alibi", "head_mask", "output_attentions", "sinks"), EAGER),
    # the last three belong to continuous batching, which has a paged cache
    **dict.fromkeys(("block_indices", "indices", "block_table", "read_index", "write_index"), SDPA),
    "prefill_chunk_size": "model.generate, which cuts the prompt",
}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention call of transformers. Takes tensors with heads first, returns (batch, q_len, num_heads, head_dim)."""
    if (
        not isinstance(attention_mask, GeometryMask)
        and not is_traced()
        and restore_attention_name(getattr(module, "config", None))
    ):
        own_arguments = {"scaling": scaling, "is_causal": is_causal, "softcap": softcap, "s_aux": s_aux}
        return _own_attention(module)(module, query, key, value, attention_mask, dropout=dropout, **own_arguments, **kwargs)
    if dropout != 0:
        raise refusal(f"dropout {dropout}", "model.eval()")
    _check_arguments(module, kwargs)
    score_arguments = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if query.shape[2] != 1 or isinstance(attention_mask, BlockMask):
        mask = _checked_mask(module, is_causal, attention_mask, query, key)
        segments = _checked_segments(mask, query, kwargs)
        inputs = _checked_inputs(query, key, value, mask, score_arguments)
        return layer_attention(module, inputs, mask.seq_len, mask, segments), None
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise refusal("a 4-D attention_mask of numbers", "one of booleans, True = visible")
    inputs = _checked_inputs(query, key, value, None, score_arguments)
    with without_autocast(query.device):
        if attention_mask is None:
            out = dense_attention(inputs)[0]
        else:
            visible = attention_mask[..., : key.shape[2]]
            out = attention_to_visible(inputs, inputs.query, visible, ~visible.any(-2).any(1))[0]
        return out.transpose(1, 2).contiguous(), None


def _own_attention(module: nn.Module) -> Any:
    """The attention function that the model's code selects by the name in its config."""
    file = sys.modules.get(type(module).__module__)
    config: Any = module.config
    functions = getattr(file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return functions.get(config._attn_implementation, getattr(file, "eager_attention_forward", None))


def _check_arguments(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse arguments of `attention` that its signature does not name."""
    for name, alternative in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise refusal(f"the argument {name}", alternative)
    if kwargs.get("output_attentions") is None and getattr(getattr(module, "config", None), "output_attentions", False):
        raise refusal("a config with output_attentions", EAGER)


def _checked_inputs(
    query: Tensor, key: Tensor, value: Tensor, mask: GeometryMask | None, score_arguments: dict[str, Any]
) -> AttentionInputs:
    """Check the tensors and build the inputs; head sizes that no mask supports run dense, and a decoding step has no mask."""
    arguments = dict(score_arguments)
    if mask is not None:
        is_at_end = isinstance(mask.offset, int) and mask.offset == key.shape[2] - query.shape[2]
        arguments |= {
            "window": mask.window,
            "attention_mask": mask.attention_mask,
            "q_offset": None if is_at_end else mask.offset,
        }
    if query.shape[3] in HEAD_DIMS and value.shape[3] in HEAD_DIMS:
        return attention_inputs(query, key, value, **arguments)
    # check all but the head sizes, gradients included, on stand-ins of a supported size
    stand_ins = [tensor[..., :1].expand(*tensor.shape[:3], HEAD_DIMS[0]) for tensor in (query, key, value)]
    checked_inputs = attention_inputs(*stand_ins, **arguments)
    scale = query.shape[3] ** -0.5 if score_arguments["scale"] is None else checked_inputs.scale
    # under autocast `attention_inputs` has cast the stand-ins to this dtype
    query, key, value = (tensor.to(checked_inputs.query.dtype) for tensor in (query, key, value))
    return checked_inputs.with_fields(query=query, key=key, value=value, scale=scale)


def _checked_mask(
    module: nn.Module, is_causal: bool | None, mask: Tensor | BlockMask | None, query: Tensor, key: Tensor
) -> GeometryMask:
    """The `GeometryMask` of a call of more than one row; refuses other masks, and attention that is not causal."""
    call_is_causal = getattr(module, "is_causal", True)
    # a `GeometryMask` says itself whether it is refused, and some modules (GPT-2) pass False with any mask
    if is_causal is not None and not isinstance(mask, GeometryMask):
        call_is_causal = is_causal
    if not call_is_causal:
        raise refusal("bidirectional or cross attention", f"{SDPA} for the parts of the model that have it")
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    if mask is None and q_len == kv_len:
        return GeometryMask((batch, 1, q_len, kv_len), 0)
    if mask is None:
        raise refusal("a prefill without a mask over a cache", f"a (batch, kv_len) attention_mask, or {SDPA}")
    if not isinstance(mask, GeometryMask):
        if MODELS_MAKE_4D_MASKS:
            models = "OPT, BART, GraniteMoe, Persimmon, FalconH1"
            feature = f"a 4-D attention_mask, which in this release of transformers some models ({models}) make themselves"
            raise refusal(feature, f"a newer release, {SDPA}, or where the mask is yours a (batch, kv_len) one")
        raise refusal("a 4-D attention_mask", f"a (batch, kv_len) attention_mask, or {SDPA}")
    if mask.refusal is not None:
        raise refusal(mask.refusal, SDPA)
    if tuple(mask.shape[2:]) != (q_len, kv_len):
        raise refusal(
            f"a call of {q_len} rows and {kv_len} keys whose mask has {mask.shape[2]} rows and {mask.shape[3]} keys "
            "(the model adds keys of its own, or the cache has another length)",
            SDPA,
        )
    return mask


def _checked_segments(mask: GeometryMask, query: Tensor, kwargs: dict[str, Any]) -> Segments | None:
    """Packed sequences by position_ids that restart, or by the caller's bounds; refuses restarts over a cache or under a mask."""
    batch, _, q_len, _ = query.shape
    rows, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    positions = kwargs.get("position_ids")
    if (
        mask.segments is None
        and isinstance(positions, Tensor)
        and positions.dim() == 2
        and positions.shape[1] == q_len
        and mask.packed.is_packed(positions, mask.attention_mask, mask.offset)
    ):
        condition = "over a cache or under an attention_mask, or in a model that masks without position_ids"
        raise refusal(f"packed sequences (position_ids that start again) {condition}", _UNPACK_OR_BOUNDS)
    if rows is None and keys is None:
        return mask.segments
    if rows is None or keys is None:
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k must come together; got cu_seq_lens_{'k' if rows is None else 'q'} alone"
        )
    if mask.attention_mask is not None or mask.shape[3] != q_len:
        raise refusal("packed sequences (cu_seq_lens_q) over a cache or under an attention_mask", _UNPACK)
    segments = mask.bounds.segments(rows, keys, batch * q_len)
    if mask.segments is not None and mask.segments != tuple(segment for segment in segments if segment.q_len):
        raise ValueError("cu_seq_lens_q must bound the same sequences as position_ids, which restart at other tokens")
    return segments
