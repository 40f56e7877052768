"""The route of one prefill call: dense attention, another method's masks, or FlexPrefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexmask.attention import attention_to_kept
from flexmask.base.inputs import HEAD_DIMS, AttentionInputs
from flexmask.block_masks import MASKS, causal_mask
from flexmask.config import FlexPrefillConfig
from flexmask.flex.dense import dense_attention, runs_dense
from flexmask.flex.dense_heads import at_gamma_one
from flexmask.flex.joined import joined_mask
from flexmask.flex.packed import dense_attention_packed
from flexmask.flex.sparse import HeadPlan, attention_by_groups
from flexmask.gallery import heads_at_once, mask_of
from flexmask.integrations.packed import Segments
from flexmask.integrations.prefill_calls import CallSize
from flexmask.integrations.prefill_mask import PrefillMask
from flexmask.integrations.right_padding import with_deciding_rows
from flexmask.integrations.run import HOOKS, RUNS, FlexPrefillRun
from flexmask.integrations.settings import PrefillSettings, outside_of_blocks
from flexmask.integrations.tensor_parallel import of_own_heads
from flexmask.plain.published import check_published
from flexmask.stats import FlexPrefillStats, empty_stats


class PrefillCall(NamedTuple):
    """One attention call of a prefill, and whose it is."""

    inputs: AttentionInputs
    tokens: int  # so far, this call's included, as far as the host knows (`PrefillMask.tokens`)
    prefill: int  # number of the mask
    layer: int
    settings: PrefillSettings
    config: FlexPrefillConfig  # of this layer, its gammas those of the heads that are here
    run: FlexPrefillRun | None  # where it is recorded
    sequence: int = 0  # of a pack

    @classmethod
    def of(cls, module: nn.Module, inputs: AttentionInputs, mask: PrefillMask) -> PrefillCall:
        """The call of an attention module, with the settings of the block or hook that it is in, else of its config."""
        run = RUNS.get(module) or HOOKS.get(module)
        settings = run.settings if run else outside_of_blocks(getattr(module, "config", None))
        layer = run.calls.layer_of(module) if run else getattr(module, "layer_idx", None)
        number = -1 if layer is None else layer
        config = of_own_heads(settings.of_layer(number), module, inputs.query.shape[1])
        return cls(inputs, mask.tokens, mask.prefill, number, settings, config, run)

    def record(self, stats: FlexPrefillStats | None, mask: BlockMask | None, reason: str | None = None) -> None:
        """Write the call into the run, if there is one."""
        if self.run is not None:
            batch, _, q_len, _ = self.inputs.query.shape
            size = CallSize(batch, q_len, self.tokens, self.sequence)
            self.run.record(self.layer, stats, mask, reason, self.prefill, size)

    @property
    def keeps_masks(self) -> bool:
        """True if the run wants the masks."""
        return self.run is not None and self.run.collect_masks


def route(call: PrefillCall) -> Tensor:
    """Attention of one prefill call, (batch, num_heads, q_len, v_head_dim)."""
    if call.run is not None and call.run.probe is not None:
        return call.run.probe(call)
    reason = reason_no_mask(call)
    if reason is not None:
        return by_sdpa(call, reason)
    reason = reason_dense_layer(call)
    if reason is not None:
        return dense_long_prompt(call, reason)
    method = call.settings.method
    if method != "flexprefill":
        return by_method(call, method if callable(method) else MASKS[method])
    return by_flexprefill(call)


def route_packed(call: PrefillCall, segments: Segments) -> Tensor:
    """Attention of packed sequences to themselves, each by a route of its own; those too short for a mask go together.

    `call` is that of the whole pack, its rows one after the other.
    """
    calls = [
        call._replace(inputs=segment.of(call.inputs), tokens=segment.kv_len, sequence=number)
        for number, segment in enumerate(segments)
        if segment.q_len > 0
    ]
    probed = call.run is not None and call.run.probe is not None
    reasons = {each.sequence: None if probed else reason_no_mask(each) for each in calls}
    together = [segments[number] for number, reason in reasons.items() if reason is not None]
    dense = iter(dense_attention_packed(call.inputs, together))
    dense_stats = empty_stats(call.inputs.query, dense=True)  # the same for all of them
    parts = []
    for each in calls:
        reason = reasons[each.sequence]
        if reason is not None:
            each.record(dense_stats, None, reason)
        parts.append(route(each) if reason is None else next(dense)[0])
    return torch.cat(parts, 2)


def reason_no_mask(call: PrefillCall) -> str | None:
    """Reason why no mask can be made or would pay, None where one would."""
    query, value = call.inputs.query, call.inputs.value
    assert value is not None
    for name, size in (("head_dim", query.shape[3]), ("v_head_dim", value.shape[3])):
        if size not in HEAD_DIMS:
            return f"{name} {size} outside {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    # the tail of a chunked prefill, tokens to verify: rows that do not fill a block cost as much to select for as to attend
    if not runs_dense(query.shape[2], call.tokens, call.settings.break_even, call.config.block_size):
        return None
    if call.tokens < call.settings.break_even:
        return f"{call.tokens} tokens < dense_below {call.settings.break_even}"
    return f"{query.shape[2]} rows < block_size {call.config.block_size}"


def reason_dense_layer(call: PrefillCall) -> str | None:
    """Reason why a layer stays dense at any length, None where it does not."""
    if call.layer in call.settings.dense_layers:
        return "in dense_layers"
    inputs = call.inputs.with_gamma(call.config.gamma)
    if call.settings.method == "flexprefill" and call.settings.break_even > 0 and all(at_gamma_one(inputs, call.config)):
        return "gamma 1 in every head"
    if call.inputs.window is not None and call.inputs.window < call.settings.break_even:
        return f"sliding window {call.inputs.window} < dense_below {call.settings.break_even}"
    return None


def by_sdpa(call: PrefillCall, reason: str) -> Tensor:
    """Dense attention by SDPA, or written out where SDPA cannot."""
    call.record(empty_stats(call.inputs.query, dense=True), None, reason)
    return dense_attention(call.inputs)[0]


def dense_long_prompt(call: PrefillCall, reason: str) -> Tensor:
    """Dense attention of a long prompt: by SDPA's causal kernel where that can run, else under the block mask of visibility."""
    inputs = call.inputs
    given = (inputs.softcap, inputs.window, inputs.attention_mask, inputs.offset, inputs.sinks)
    if inputs.query.shape[2] == inputs.key.shape[2] and all(x is None for x in given):
        return by_sdpa(call, reason)
    return by_method(call, causal_mask, reason)


def by_method(call: PrefillCall, method: Callable[..., BlockMask], reason: str | None = None) -> Tensor:
    """Attention under the masks of another method; with a `reason` they are those of dense attention, and recorded so."""
    inputs, settings, block_size = call.inputs, call.settings, call.config.block_size
    options = settings.method_options if reason is None else {}
    masks: list[BlockMask] = []

    def make_mask(part: AttentionInputs) -> HeadPlan:
        made = mask_of(method, part, block_size, options, with_keep=call.keeps_masks)
        if call.keeps_masks:
            masks.append(made)
        return HeadPlan(made)

    at_once = heads_at_once(method, inputs, block_size, settings.max_mask_bytes, options)
    out = attention_by_groups(inputs, make_mask, block_size, at_once, settings.backend)[0]
    stats = None if reason is None else empty_stats(inputs.query, dense=True)
    call.record(stats, joined_mask(masks, inputs) if masks else None, reason)
    return out


def by_flexprefill(call: PrefillCall) -> Tensor:
    """Attention over the blocks that FlexPrefill keeps."""
    check_published(call.config, call.inputs)
    with_stats = call.run is not None and call.run.collect_stats
    masks: list[BlockMask] | None = [] if call.keeps_masks else None
    inputs, settings = with_deciding_rows(call.inputs, call.run), call.settings
    limits = (settings.max_mask_bytes, settings.break_even > 0)
    out, _, stats = attention_to_kept(inputs, call.config, settings.backend, *limits, return_stats=with_stats, masks=masks)
    call.record(stats, joined_mask(masks, call.inputs) if masks else None)
    return out
