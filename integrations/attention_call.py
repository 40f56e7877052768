"""The attention function of transformers: FlexPrefill or another method for a prefill, dense attention for decoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import block_mask_from_lists
from flexmask.attention import attention_by_groups, flexprefill_attention
from flexmask.block_masks import MASKS, causal_mask
from flexmask.checks import check_query_key, check_value
from flexmask.dense import attention_to_visible, dense_attention
from flexmask.flexprefill import device_offset, flexprefill_mask
from flexmask.integrations.prefill_mask import PrefillMask
from flexmask.integrations.settings import PrefillSettings, saved_settings
from flexmask.memory import HeadGroup, mask_bytes
from flexmask.stats import FlexPrefillStats, empty_stats

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


@dataclass
class FlexPrefillRun:
    """The settings of one model, and what its prefill calls chose.

    Attributes
    ----------
    settings
        The options.
    stats
        By layer index: the statistics of each call of more than one row, in order, of those that verify guessed tokens too.
        Decoding steps of one row leave none, nor does what another method than FlexPrefill chooses; calls that run dense do.
    masks
        By layer index, only with `collect_masks`: the mask of each such call, None for one that ran dense without a mask.
    collect_stats, collect_masks
        Whether these are kept.
    """

    settings: PrefillSettings = field(default_factory=PrefillSettings)
    collect_stats: bool = True
    collect_masks: bool = False
    stats: dict[int, list[FlexPrefillStats]] = field(default_factory=dict)
    masks: dict[int, list[BlockMask | None]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """One row a layer, prefill call, batch row and head: its pattern, distance, density and coverage."""
        return [
            {
                "layer": layer,
                "call": call,
                "batch": batch,
                "head": head,
                "pattern": "dense" if stats.dense else "query-aware" if stats.is_query_aware[batch, head] else "vertical-slash",
                "distance": float(stats.js_distance[batch, head]),
                "density": float(stats.density[batch, head]),
                "coverage": float(stats.coverage[batch, head]),
            }
            for layer, calls in sorted(self.stats.items())
            for call, stats in enumerate(calls)
            for batch in range(stats.density.shape[0])
            for head in range(stats.density.shape[1])
        ]


# by attention module rather than by config object, which several models may share; of open blocks, and of hooked models
RUNS: WeakKeyDictionary[nn.Module, FlexPrefillRun] = WeakKeyDictionary()
HOOKS: WeakKeyDictionary[nn.Module, FlexPrefillRun] = WeakKeyDictionary()


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
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    if query.shape[2] == 1 and not isinstance(attention_mask, BlockMask):
        out = _decoded(query, key, value, attention_mask, scale, softcap, s_aux)
    else:
        out = _prefilled(module, query, key, value, _visibility(attention_mask, query, key), scale, softcap, s_aux)
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


def _decoded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Dense attention of one row, which sees every key but for those that `mask` hides."""
    if mask is None:
        return dense_attention(query, key, value, scale, softcap, None, None, None, sinks)[0]
    mask = mask[..., : key.shape[2]]
    if mask.dtype != torch.bool:
        raise refusal("a 4-D attention_mask of numbers", "one of booleans, True = visible")
    return attention_to_visible(query, key, value, mask, scale, softcap, sinks)[0]


def _prefilled(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PrefillMask,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    run = RUNS.get(module) or HOOKS.get(module)
    settings = run.settings if run else saved_settings(getattr(module, "config", None)) or PrefillSettings()
    layer = getattr(module, "layer_idx", -1)
    config = settings.of_layer(layer)
    q_len, kv_len = query.shape[2], key.shape[2]
    at_end = isinstance(mask.offset, int) and mask.offset == kv_len - q_len
    seen: dict[str, Any] = {
        "window": mask.window,
        "attention_mask": mask.attention_mask,
        "q_offset": None if at_end else mask.offset,
    }

    # rows that do not fill a block (the tail of a chunked prefill, tokens to verify) cost as much to select for as to attend
    short = kv_len < settings.break_even or q_len < config.block_size
    exact = layer in settings.dense_layers or (mask.window is not None and mask.window < settings.break_even)
    plain = (
        q_len == kv_len and at_end and mask.window is None and mask.attention_mask is None and softcap is None and sinks is None
    )
    if short or (exact and plain):
        offset = device_offset(seen["q_offset"], query, key)
        visible = (mask.window, mask.attention_mask, offset)
        out = dense_attention(query, key, value, scale, softcap, *visible, sinks)[0]
        _collect(run, layer, empty_stats(query, dense=True), None)
        return out
    if exact or settings.method != "flexprefill":
        check_query_key(query, key)
        check_value(value, key)
        method = causal_mask if exact else settings.method if callable(settings.method) else MASKS[settings.method]
        masked = _masks_of(method, config.block_size, scale, softcap, seen)
        at_once = settings.max_mask_bytes // mask_bytes(q_len, kv_len, config)
        kernel = (scale, softcap, sinks, settings.backend, False)
        out = attention_by_groups(masked, query, key, value, config, at_once, *kernel)[0]
        if run and run.collect_masks:
            whole = HeadGroup(slice(0, query.shape[0]), slice(0, query.shape[1]), slice(0, key.shape[1]))
            _collect(run, layer, empty_stats(query, dense=True) if exact else None, masked(whole, query, key, False)[0])
        elif exact:
            _collect(run, layer, empty_stats(query, dense=True), None)
        return out

    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "config": config, **seen}
    with_stats = run is not None and (run.collect_stats or run.collect_masks)
    result: Any = flexprefill_attention(
        query,
        key,
        value,
        **options,
        sinks=sinks,
        return_stats=with_stats,
        backend=settings.backend,
        dense_below=0,
        max_mask_bytes=settings.max_mask_bytes,
    )
    if run is None or not with_stats:
        return result
    # with statistics again: that search is compiled already
    made: Any = flexprefill_mask(query, key, **options, return_stats=True) if run.collect_masks else (None,)
    _collect(run, layer, result[1], made[0])
    return result[0]


def _masks_of(
    method: Callable[..., BlockMask], block_size: int, scale: float, softcap: float | None, seen: dict[str, Any]
) -> Callable[[HeadGroup, Tensor, Tensor, bool], tuple[BlockMask, None]]:
    """What makes the masks of `method`, group of heads by group."""
    scores = {"scale": scale, "softcap": softcap}
    taken = inspect.signature(method).parameters
    options = {name: value for name, value in scores.items() if name in taken}

    def masked(group: HeadGroup, query: Tensor, key: Tensor, grad: bool) -> tuple[BlockMask, None]:
        padding = seen["attention_mask"]
        part = {**seen, "attention_mask": None if padding is None else padding[group.batch]}
        made = method(query, key, block_size=block_size, **options, **part)
        if made.BLOCK_SIZE != (block_size, block_size):
            raise ValueError(f"method must give a mask in blocks of {block_size} tokens, as it is told to; got {made.BLOCK_SIZE}")
        if grad:  # which asks for lists by key block too
            lists: Any = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
            lengths = (query.shape[2], key.shape[2])
            made = block_mask_from_lists(lists, made.mask_mod, block_size, lengths, with_gradients=True)
        return made, None

    return masked


def _collect(run: FlexPrefillRun | None, layer: int, stats: FlexPrefillStats | None, mask: BlockMask | None) -> None:
    if run is None:
        return
    if run.collect_stats and stats is not None:
        run.stats.setdefault(layer, []).append(stats)
    if run.collect_masks:
        run.masks.setdefault(layer, []).append(mask)
