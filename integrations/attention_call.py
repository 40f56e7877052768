"""The attention function of transformers: FlexPrefill or another method for a prefill, dense attention for decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.inputs import HEAD_DIMS, AttentionInputs, attention_inputs
from flexmask.flex.dense import attention_to_visible, dense_attention
from flexmask.integrations.packed import Segments, in_one_row, in_rows
from flexmask.integrations.prefill_mask import PrefillMask
from flexmask.integrations.route import PrefillCall, route, route_packed
from flexmask.integrations.versions import MODELS_MAKE_4D_MASKS

_SDPA, _EAGER = 'attn_implementation="sdpa"', 'attn_implementation="eager"'
_UNPACK = "use_cache=False and no attention_mask, with which packed sequences are served, or one prompt a batch row"
# Arguments that change attention, and what to use instead. The rest of what a model's forward is called with comes along too
# (labels, lengths, flags, a tokenizer), and passes.
_REFUSED = {
    "position_bias": _EAGER,
    "attention_bias": _EAGER,
    "alibi": _EAGER,
    "head_mask": _EAGER,
    "output_attentions": _EAGER,
    "block_indices": _SDPA,
    "indices": _SDPA,
    "sinks": _EAGER,
    "block_table": _SDPA,
    # of continuous batching, whose keys lie in a paged cache
    "read_index": _SDPA,
    "write_index": _SDPA,
    "prefill_chunk_size": "model.generate, which cuts the prompt",
}


def attention_call(
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
) -> tuple[Tensor, None]:
    """The attention call of transformers: heads first in, (batch, q_len, num_heads, head_dim) out."""
    if dropout != 0:
        raise refusal(f"dropout {dropout}", "model.eval()")
    for name, instead in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise refusal(f"the argument {name}", instead)
    if kwargs.get("output_attentions") is None and getattr(getattr(module, "config", None), "output_attentions", False):
        raise refusal("a config with output_attentions", _EAGER)
    scores: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if query.shape[2] == 1 and not isinstance(attention_mask, BlockMask):
        # one row sees every key that is not masked, causal or not
        out = _decoded(_inputs(query, key, value, **scores), attention_mask)
    else:
        _check_causal(module, is_causal, attention_mask)
        mask = _visibility(attention_mask, query, key)
        segments = _segments(mask, query, kwargs)
        if segments is not None:
            inputs = in_one_row(_inputs(query, key, value, **scores, window=mask.window))
            out = in_rows(route_packed(PrefillCall.of(module, inputs, mask), segments), query.shape[0])
            return out.transpose(1, 2).contiguous(), None
        at_end = isinstance(mask.offset, int) and mask.offset == key.shape[2] - query.shape[2]
        where = {"window": mask.window, "attention_mask": mask.attention_mask, "q_offset": None if at_end else mask.offset}
        out = route(PrefillCall.of(module, _inputs(query, key, value, **scores, **where), mask))
    return out.transpose(1, 2).contiguous(), None


def refusal(what: str, instead: str) -> NotImplementedError:
    """The error for what is not served."""
    return NotImplementedError(f"flexprefill attention does not serve {what}; use {instead}")


def _inputs(query: Tensor, key: Tensor, value: Tensor, **where: Any) -> AttentionInputs:
    """The checked problem, also of heads of a size that no mask is made for: `route` takes those to dense attention."""
    if query.shape[3] in HEAD_DIMS and value.shape[3] in HEAD_DIMS:
        return attention_inputs(query, key, value, **where)
    # everything else is checked on heads that pass
    stand_ins = [x.new_empty(()).expand(*x.shape[:3], HEAD_DIMS[0]) for x in (query, key, value)]
    checked = attention_inputs(*stand_ins, **where)
    scale = query.shape[3] ** -0.5 if where.get("scale") is None else checked.scale
    return checked.with_fields(query=query, key=key, value=value, scale=scale)


def _check_causal(module: nn.Module, is_causal: bool | None, mask: Tensor | BlockMask | None) -> None:
    """Refuse attention that is not causal.

    Under a mask of ours the argument `is_causal` says nothing: some modules (GPT-2) pass False wherever they were given a mask,
    and a mask that is not causal holds its own refusal.
    """
    causal = getattr(module, "is_causal", True)
    if is_causal is not None and not isinstance(mask, PrefillMask):
        causal = is_causal
    if not causal:
        raise refusal("bidirectional or cross attention", f"{_SDPA} for the parts of the model that have it")


def _visibility(mask: Tensor | BlockMask | None, query: Tensor, key: Tensor) -> PrefillMask:
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    if mask is None and q_len == kv_len:
        return PrefillMask((batch, 1, q_len, kv_len), 0)
    if mask is None:
        raise refusal("a prefill without a mask over a cache", f"a (batch, kv_len) attention_mask, or {_SDPA}")
    if not isinstance(mask, PrefillMask):
        what = "a 4-D attention_mask"
        if MODELS_MAKE_4D_MASKS:
            what += (
                ", which in this release of transformers some models (OPT, BART, GraniteMoe, Persimmon, FalconH1) make themselves"
            )
            raise refusal(what, f"a newer release, {_SDPA}, or where the mask is yours a (batch, kv_len) one")
        raise refusal(what, f"a (batch, kv_len) attention_mask, or {_SDPA}")
    if mask.refusal is not None:
        raise refusal(mask.refusal, _SDPA)
    if tuple(mask.shape[2:]) != (q_len, kv_len):
        raise refusal(
            f"{q_len} rows and {kv_len} keys under a mask of {mask.shape[2]} and {mask.shape[3]} "
            "(keys that the model adds to those of its tokens, or a cache of another length)",
            _SDPA,
        )
    return mask


def _segments(mask: PrefillMask, query: Tensor, kwargs: dict[str, Any]) -> Segments | None:
    """The packed sequences of a call, None for one of single prompts.

    They come from the mask, which transformers makes of position_ids that start again where there is neither a cache nor an
    attention_mask, or from the caller's bounds. Positions that start again elsewhere are refused, as far as they are handed over
    at all: some models have three of each token.
    """
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
        raise refusal("packed sequences (position_ids that start again) over a cache or under an attention_mask", _UNPACK)
    if rows is None and keys is None:
        return mask.segments
    if rows is None or keys is None:
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k must come together; got cu_seq_lens_{'k' if rows is None else 'q'} alone"
        )
    if mask.attention_mask is not None or mask.shape[3] != q_len:
        raise refusal("packed sequences (cu_seq_lens_q) over a cache or under an attention_mask", _UNPACK)
    segments = mask.bounds.segments(rows, keys, batch * q_len)
    if mask.segments is not None and mask.segments != tuple(each for each in segments if each.q_len):
        raise ValueError("cu_seq_lens_q must name the sequences that position_ids do, which start again elsewhere")
    return segments


def _decoded(inputs: AttentionInputs, mask: Tensor | None) -> Tensor:
    """Dense attention of one row, which sees every key but those that `mask` hides."""
    if mask is None:
        return dense_attention(inputs)[0]
    mask = mask[..., : inputs.key.shape[2]]
    if mask.dtype != torch.bool:
        raise refusal("a 4-D attention_mask of numbers", "one of booleans, True = visible")
    return attention_to_visible(inputs, mask)[0]
