"""A causal model whose prefills attend to the blocks of a setting."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from bench.decoding import CACHE, decode, prefill
from bench.fidelity.settings import Setting
from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.base.selection import Selection
from flexmask.flex.backend import chosen_backend
from flexmask.flex.block_mask import block_mask
from flexmask.flex.dense import dense_attention
from flexmask.flex.run import run_flex_attention
from flexmask.selection.prepare import prepare_selection
from flexmask.selection.select import select_blocks

_NUMBERS = itertools.count()
# tokens whose logits are held at a time
_LOGITS = 4096


class SparseModel:
    """A causal model of transformers, for prompts without padding; dense outside of `attending` and for single rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._setting: Setting | None = None
        self._kept: dict[int, Tensor] = {}
        self._prompt_len: int | None = None  # of a prefill in chunks
        name = f"fidelity{next(_NUMBERS)}"
        AttentionInterface.register(name, self._attend)
        # prompts without padding need no mask beyond causality
        AttentionMaskInterface.register(name, lambda *arguments, **options: None)
        model.set_attn_implementation(name)

    @contextmanager
    def attending(self, setting: Setting | None) -> Iterator[None]:
        """Attend to the blocks of `setting`, to all if None."""
        self._setting, self._kept = setting, {}
        try:
            yield
        finally:
            self._setting = None

    def density(self, first: int = 0, end: int | None = None) -> float:
        """Kept share of the causal blocks in query blocks `first` to `end`, mean over layers and heads; 1 if dense."""
        if not self._kept:
            return 1.0
        kept = torch.stack(list(self._kept.values())).mean(0)
        seen = torch.arange(1, len(kept) + 1, device=kept.device)
        return float(kept[first:end].sum() / seen[first:end].sum())

    @torch.no_grad()
    def log_probs(self, ids: Tensor, chunk: int | None = None) -> Tensor:
        """Log-probability of every next token, (tokens - 1,) float32, of a whole prefill or of chunks."""
        cache = DynamicCache(config=self.model.config) if chunk else None
        self._prompt_len, found = len(ids), []
        for part, following in zip(ids.split(chunk or len(ids)), ids[1:].split(chunk or len(ids)), strict=False):
            hidden = self.model.base_model(input_ids=part[None], use_cache=cache is not None, **{CACHE: cache})
            pieces = zip(hidden.last_hidden_state[0, : len(following)].split(_LOGITS), following.split(_LOGITS), strict=True)
            for states, target in pieces:
                logits = self.model.get_output_embeddings()(states).float()
                found.append(-F.cross_entropy(logits, target, reduction="none"))
        return torch.cat(found)

    def answers(self, setting: Setting | None, token_ids: Tensor, count: int, chunk: int | None = None) -> Tensor:
        """Greedy tokens after each prompt, (batch, count): prefilled with `setting`, decoded dense."""
        self._prompt_len = token_ids.shape[1]
        with self.attending(setting):
            logits, cache = prefill(self.model, token_ids, chunk)
        return decode(self.model, logits, cache, count)

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        inputs = attention_inputs(query, key, value, scale=scaling, prompt_len=self._prompt_len)
        layer = module.layer_idx
        if query.shape[2] == 1 or self._setting is None:
            out = dense_attention(inputs)[0]
        else:
            out, selected = sparse_attention(inputs, self._setting, layer)
            self._count(inputs, selected, layer)
        return out.transpose(1, 2).contiguous(), None

    def _count(self, inputs: AttentionInputs, selected: Selection, layer: int) -> None:
        """Add the kept blocks of every query block, mean over heads; chunks must be whole blocks."""
        kept = (selected.lists.kv_num_blocks + selected.lists.full_kv_num_blocks).float().mean((0, 1))
        before = (inputs.key.shape[2] - inputs.query.shape[2]) // selected.block_size
        earlier = self._kept.get(layer, kept.new_zeros(0))[:before]
        self._kept[layer] = torch.cat([earlier, kept])


def sparse_attention(inputs: AttentionInputs, setting: Setting, layer: int = 0) -> tuple[Tensor, Selection]:
    """Attention of checked inputs to a setting's blocks, and the selection; SDPA on CPUs, which compiles nothing."""
    chosen, on_gpu = setting.layer_method(layer).for_inputs(inputs), inputs.query.is_cuda
    inputs = inputs.for_attention()
    selected = select_blocks(prepare_selection(chosen, inputs), inputs, with_map=not on_gpu)
    if on_gpu:
        backend = chosen_backend("auto", inputs, selected.block_size)
        return run_flex_attention(inputs, block_mask(inputs, selected), backend.name, lse_factor=backend.lse_factor)[0], selected
    assert inputs.value is not None
    (q_len, kv_len), size = (inputs.query.shape[2], inputs.key.shape[2]), selected.block_size
    seen = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    if selected.keep is not None:
        seen = seen & selected.keep.repeat_interleave(size, 2)[:, :, :q_len].repeat_interleave(size, 3)[..., :kv_len]
    return F.scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value, attn_mask=seen, scale=inputs.scale, enable_gqa=True
    ), selected
