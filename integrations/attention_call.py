"""The attention function of transformers: FlexPrefill or another method for a prefill, dense attention for decoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexmask.attention import attention_to_kept
from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.block_masks import MASKS, causal_mask
from flexmask.config import FlexPrefillConfig
from flexmask.flex.dense import attention_to_visible, dense_attention
from flexmask.flex.head_groups import mask_bytes
from flexmask.flex.sparse import sparse_attention
from flexmask.integrations.prefill_mask import PrefillMask
from flexmask.integrations.run import HOOKS, RUNS, FlexPrefillRun
from flexmask.integrations.settings import PrefillSettings, saved_settings
from flexmask.mask import flexprefill_mask
from flexmask.plain.published import check_published
from flexmask.stats import empty_stats

# what models hand to attention that does not change its result; anything else that is set is refused
_HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "sliding_window",
    }
)


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
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise refusal(
            "bidirectional or cross attention (an encoder)",
            'attn_implementation="sdpa" for that part, as in set_attn_implementation({"text_config": "flexprefill"})',
        )
    for name, argument in kwargs.items():
        if name not in _HARMLESS and argument is not None and argument is not False:
            raise refusal(f"the argument {name}", 'attn_implementation="eager"')
    if kwargs.get("output_attentions") is None and getattr(getattr(module, "config", None), "output_attentions", False):
        raise refusal("a config with output_attentions", 'attn_implementation="eager"')
    scores: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if query.shape[2] == 1 and not isinstance(attention_mask, BlockMask):
        out = _decoded(attention_inputs(query, key, value, **scores), attention_mask)
    else:
        mask = _visibility(attention_mask, query, key)
        at_end = isinstance(mask.offset, int) and mask.offset == key.shape[2] - query.shape[2]
        inputs = attention_inputs(
            query,
            key,
            value,
            window=mask.window,
            attention_mask=mask.attention_mask,
            q_offset=None if at_end else mask.offset,
            **scores,
        )
        out = _prefilled(module, inputs)
    return out.transpose(1, 2).contiguous(), None


def refusal(what: str, instead: str) -> NotImplementedError:
    """The error for what is not served."""
    return NotImplementedError(f"flexprefill attention does not serve {what}; use {instead}")


def _visibility(mask: Tensor | BlockMask | None, query: Tensor, key: Tensor) -> PrefillMask:
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    if mask is None and q_len == kv_len:
        return PrefillMask((batch, 1, q_len, kv_len), 0)
    if not isinstance(mask, PrefillMask):
        what = (
            "a prefill without a mask over a cache" if mask is None else f"an attention_mask of type {type(mask).__name__} (4-D)"
        )
        raise refusal(what, 'a (batch, kv_len) attention_mask, or attn_implementation="sdpa"')
    if mask.refusal is not None:
        raise refusal(mask.refusal, 'attn_implementation="sdpa"')
    if tuple(mask.shape[2:]) != (q_len, kv_len):
        raise refusal(f"{kv_len} keys under a mask of {mask.shape[3]} (a cache that says another length)", "a DynamicCache")
    return mask


def _decoded(inputs: AttentionInputs, mask: Tensor | None) -> Tensor:
    """Dense attention of one row, which sees every key but those that `mask` hides."""
    if mask is None:
        return dense_attention(inputs)[0]
    mask = mask[..., : inputs.key.shape[2]]
    if mask.dtype != torch.bool:
        raise refusal("a 4-D attention_mask of numbers", "one of booleans, True = visible")
    return attention_to_visible(inputs, mask)[0]


def _prefilled(module: nn.Module, inputs: AttentionInputs) -> Tensor:
    """Route one prefill call: dense, dense by block mask, another method, or FlexPrefill."""
    run = RUNS.get(module) or HOOKS.get(module)
    settings = run.settings if run else saved_settings(getattr(module, "config", None)) or PrefillSettings()
    layer = getattr(module, "layer_idx", -1)
    config = settings.of_layer(layer)
    q_len, kv_len = inputs.query.shape[2], inputs.key.shape[2]

    # rows that do not fill a block (the tail of a chunked prefill, tokens to verify) cost as much to select for as to attend
    short = kv_len < settings.break_even or q_len < config.block_size
    exact = layer in settings.dense_layers or (inputs.window is not None and inputs.window < settings.break_even)
    # SDPA's own causal kernel can run
    plain = q_len == kv_len and inputs[4:] == (None,) * 5
    if short or (exact and plain):
        if run is not None:
            run.record(layer, empty_stats(inputs.query, dense=True), None, _why_dense(inputs, layer, settings, config))
        return dense_attention(inputs)[0]
    if exact or settings.method != "flexprefill":
        method = causal_mask if exact else settings.method if callable(settings.method) else MASKS[settings.method]
        return _by_method(inputs, method, None if run is None else (run, layer, exact), settings, config)
    return _by_flexprefill(inputs, run, layer, settings, config)


def _by_method(
    inputs: AttentionInputs,
    method: Callable[..., BlockMask],
    record: tuple[FlexPrefillRun, int, bool] | None,
    settings: PrefillSettings,
    config: FlexPrefillConfig,
) -> Tensor:
    """Attention under the masks of another method; `record` is the run, the layer and whether it counts as dense."""
    scores = {"scale": inputs.scale, "softcap": inputs.softcap}
    taken = inspect.signature(method).parameters
    options = {name: value for name, value in scores.items() if name in taken}
    masks = []

    def make_mask(part: AttentionInputs) -> tuple[BlockMask, None]:
        where = {"window": part.window, "attention_mask": part.attention_mask, "q_offset": part.offset}
        made = method(part.query, part.key, block_size=config.block_size, **options, **where)
        if made.BLOCK_SIZE != (config.block_size, config.block_size):
            raise ValueError(
                f"method must give a mask in blocks of {config.block_size} tokens, as it is told to; got {made.BLOCK_SIZE}"
            )
        masks.append(made)
        return made, None

    at_once = settings.max_mask_bytes // mask_bytes(inputs.query.shape[2], inputs.key.shape[2], config)
    out = sparse_attention(inputs.placed(), make_mask, config.block_size, at_once, settings.backend)[0]
    run, layer, exact = record or (None, -1, False)
    if run:
        whole = None
        if run.collect_masks:
            whole = masks[0] if len(masks) == 1 else make_mask(inputs.placed())[0]
        reason = _why_dense(inputs, layer, settings, config) if exact else None
        run.record(layer, empty_stats(inputs.query, dense=True) if exact else None, whole, reason)
    return out


def _by_flexprefill(
    inputs: AttentionInputs, run: FlexPrefillRun | None, layer: int, settings: PrefillSettings, config: FlexPrefillConfig
) -> Tensor:
    """Attention over the blocks that FlexPrefill keeps."""
    check_published(config, inputs)
    with_stats = run is not None and (run.collect_stats or run.collect_masks)
    out, _, stats = attention_to_kept(inputs, config, settings.backend, settings.max_mask_bytes, return_stats=with_stats)
    if run is not None:
        made: Any = None
        if run.collect_masks:
            options = {"scale": inputs.scale, "softcap": inputs.softcap, "window": inputs.window, "config": config}
            where = {"attention_mask": inputs.attention_mask, "q_offset": inputs.offset}
            made = flexprefill_mask(inputs.query, inputs.key, **options, **where)  # type: ignore[arg-type]
        run.record(layer, stats, made)
    return out


def _why_dense(inputs: AttentionInputs, layer: int, settings: PrefillSettings, config: FlexPrefillConfig) -> str:
    """The reason for a dense call, as the run and the log give it."""
    if inputs.key.shape[2] < settings.break_even:
        return f"{inputs.key.shape[2]} tokens < dense_below {settings.break_even}"
    if inputs.query.shape[2] < config.block_size:
        return f"{inputs.query.shape[2]} new tokens < block_size {config.block_size}"
    if layer in settings.dense_layers:
        return f"layer {layer} is in dense_layers"
    return f"window {inputs.window} < dense_below {settings.break_even}"
