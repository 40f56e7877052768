"""Decides what runs dense, and why: calls, layers and single heads; and logs it."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

import torch

from flexmask._torch import is_traced
from flexmask.base.checks import GRADIENT_DIMS, HEAD_DIMS
from flexmask.base.inputs import AttentionInputs
from flexmask.flex.dense import sdpa_serves
from flexmask.logged_once import first_time

_log = logging.getLogger("flexmask")
# tokens of kv_len (docs/performance.md)
DENSE_BELOW = 16384
# density above which SDPA is faster than FlexAttention's CPU kernel, mask included: python -m bench.speed.cpu
CPU_BREAK_EVEN = {torch.float32: 0.66, torch.float16: 0.51, torch.bfloat16: 0.43}


class DensePolicy(NamedTuple):
    """The conditions under which dense attention runs instead of a selection."""

    dense_below: int = DENSE_BELOW  # tokens; 0 switches the policy off, except for the two fields below
    min_rows: int = 2  # calls of fewer rows run dense
    dense_layers: tuple[int, ...] = ()  # indices of layers that run dense

    def size_reason(self, q_len: int, tokens: int) -> str | None:
        """Reason why `q_len` rows at the end of `tokens` run dense, if they do."""
        if tokens < self.dense_below:
            return f"{tokens} tokens < dense_below {self.dense_below}"
        if q_len < self.min_rows:
            return f"{q_len} rows < {self.min_rows}"
        return None

    def selection_reason(self, keeps_every_block: list[bool]) -> str | None:
        """Reason why a selection has nothing to drop, if it has none."""
        return "every head keeps every block" if self.dense_below > 0 and all(keeps_every_block) else None

    def dense_layer_reason(self, layer: int, window: int | None) -> str | None:
        """Reason why a layer runs dense at any length, if it does."""
        if layer in self.dense_layers:
            return "in dense_layers"
        if window is not None and window < self.dense_below:
            return f"sliding window {window} < dense_below {self.dense_below}"
        return None


def head_dim_reason(head_dim: int, v_head_dim: int, needs_grad: bool = False) -> str | None:
    """Reason why heads of these sizes run dense, if they do: flexmask makes no mask for them."""
    for name, size in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if needs_grad and size in HEAD_DIMS and size > GRADIENT_DIMS:
            return f"{name} {size} over {GRADIENT_DIMS}, with gradients"
        if size not in HEAD_DIMS:
            return f"{name} {size} outside {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    return None


def sdpa_computes(inputs: AttentionInputs) -> bool:
    """True if SDPA's causal kernel computes the call: a whole prompt without padding, offset, window, soft cap or sinks."""
    return inputs.query.shape[2] == inputs.key.shape[2] and sdpa_serves(inputs, return_lse=False)


def log_dense_once(reason: str | None, q_len: int) -> None:
    """Log why a call runs dense, if it does: once per reason, whatever its numbers. Decoding, a single row, is not logged."""
    if reason is None or q_len == 1 or is_traced():
        return
    if first_time("dense", re.sub(r"\d+", "", reason)):
        _log.warning("flexmask: attention ran dense: %s (logged once per process and reason)", reason)
