"""Greedy decoding of a batch whose prompts keep the blocks of batches of one.

Pads on the right, where every row starts on the grid of blocks. New tokens follow the masked padding at their own positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

# options that do not affect greedy decoding
_ENDS = {"bos_token_id", "eos_token_id", "pad_token_id", "max_length"}
_SAMPLING = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "num_return_sequences",
}
_OUTPUTS = {"transformers_version", "_from_model_config", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
_NEEDED = {"attention_mask", "position_ids", "past_key_values", "logits_to_keep"}


def decodes_greedily(model: Any, options: Mapping[str, Any]) -> bool:
    """True if `decode` equals ``generate`` of an unwrapped model with these keywords.

    Requires plain greedy decoding over a full cache: no beams, penalties or sliding windows.
    """
    if options.get("do_sample") or (options.get("do_sample") is None and options.get("temperature", 0.0) != 0.0):
        return False
    changed = {name for name, value in model.generation_config.to_diff_dict().items() if value is not None}
    if changed - _ENDS - _SAMPLING - _OUTPUTS or set(options) - _SAMPLING - {"use_cache"}:
        return False
    if options.get("num_return_sequences", 1) != 1:
        return False
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    slides = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    if slides or getattr(text, "attention_chunk_size", None) or any(kind != "full_attention" for kind in kinds):
        return False
    return set(inspect.signature(model.forward).parameters) >= _NEEDED


def ends_of(model: Any) -> set[int]:
    found = model.generation_config.eos_token_id
    return set() if found is None else {found} if isinstance(found, int) else set(found)


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Tensor],
    limit: int,
    is_done: Callable[[list[int]], bool],
    prefill: AbstractContextManager[Any],
) -> list[list[int]]:
    """Continue prompts, (length,) token ids on the model's device, by their most likely tokens; returns the new ones.

    Stops at `limit` >= 1 tokens, or when `is_done` of the new tokens is True. Only reading the prompts runs in `prefill`.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1 token; got {limit}: a prompt is as long as max_length")
    found: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    done: set[int] = set()
    logits, cache, mask = _read(model, prompts, prefill)
    positions = mask.sum(1)
    while True:
        chosen = logits.argmax(-1)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row not in done:
                found[row].append(token)
                if len(found[row]) == limit or is_done(found[row]):
                    done.add(row)
        going = [index for index, row in enumerate(rows) if row not in done]
        if not going:
            return found
        if 4 * len(going) <= 3 * len(rows):  # copying the cache for every finished row would cost more than it saves
            left = torch.tensor(going, device=mask.device)
            cache.batch_select_indices(left)
            chosen, mask, positions = chosen[left], mask[left], positions[left]
            rows = [rows[index] for index in going]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        logits = model(
            input_ids=chosen[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        positions = positions + 1


def _read(model: Any, prompts: Sequence[Tensor], prefill: AbstractContextManager[Any]) -> tuple[Tensor, Any, Tensor]:
    """Logits after each prompt, the cache, and the mask (batch, length)."""
    lengths = torch.tensor([len(each) for each in prompts], device=prompts[0].device)
    padded = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
    mask = (torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]).long()
    last = (lengths - 1).unique()  # logits of every token of every prompt would not fit
    with prefill:
        read = model(input_ids=padded, attention_mask=mask, logits_to_keep=last, use_cache=True)
    own = torch.searchsorted(last, lengths - 1)
    return read.logits[torch.arange(len(prompts), device=own.device), own], read.past_key_values, mask
