"""Dense or sparse, and why, for calls, layers and single heads; and the log line that says so."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

import torch

from flexmask._torch import in_dispatch_mode, is_traced
from flexmask.base.checks import GRADIENT_DIMS, HEAD_DIMS
from flexmask.base.inputs import AttentionInputs
from flexmask.flex.dense import sdpa_serves
from flexmask.selector import METHODS, CallSelector

_log = logging.getLogger("flexmask")
_said: set[str] = set()
# tokens of kv_len (docs/performance.md)
DENSE_BELOW = 16384
# density above which SDPA is faster than FlexAttention's CPU kernel, mask included: python -m bench.speed.cpu
CPU_BREAK_EVEN = {torch.float32: 0.66, torch.float16: 0.51, torch.bfloat16: 0.43}


class CallPlan(NamedTuple):
    """The way that serves one call: dense attention, every visible block (`every_block_plan`), or a selection."""

    block_size: int  # for which the backend is checked, of dense calls too
    reason: str | None  # why all of it is dense, if it is
    selector: CallSelector | None = None  # chooses the blocks; None: dense attention serves the whole call
    dense_key_heads: tuple[bool, ...] = ()  # of a selector: served by dense attention, as known before any mask is made
    most_kept: float | None = None  # density above which dense attention serves another key head, too


class DensePolicy(NamedTuple):
    """When dense attention runs instead of a selection."""

    dense_below: int = DENSE_BELOW  # tokens; 0 switches the policy off, except for the two below
    least_rows: int = 2
    dense_layers: tuple[int, ...] = ()

    def by_size(self, q_len: int, tokens: int) -> str | None:
        """Reason why `q_len` rows at the end of `tokens` run dense, if they do."""
        if tokens < self.dense_below:
            return f"{tokens} tokens < dense_below {self.dense_below}"
        if q_len < self.least_rows:
            return f"{q_len} rows < {self.least_rows}"
        return None

    def by_selection(self, keeps_all: list[bool]) -> str | None:
        """Reason why a selection has nothing to drop, if it has none."""
        return "every head keeps every block" if self.dense_below > 0 and all(keeps_all) else None

    def by_layer(self, layer: int, window: int | None) -> str | None:
        """Reason why a layer runs dense at any length, if it does."""
        if layer in self.dense_layers:
            return "in dense_layers"
        if window is not None and window < self.dense_below:
            return f"sliding window {window} < dense_below {self.dense_below}"
        return None


def call_plan(policy: DensePolicy, inputs: AttentionInputs, selector: CallSelector, return_lse: bool = False) -> CallPlan:
    """Decide for one call: dense with few tokens or rows, or where every head keeps every block; else by key head."""
    num_heads, num_kv_heads = inputs.query.shape[1], inputs.key.shape[1]
    per_key, keeps_all, size = num_heads // num_kv_heads, selector.keeps_all, selector.block_size
    fits = policy.dense_below > 0 and not return_lse and has_causal_kernel(inputs)
    reason = policy.by_size(inputs.query.shape[2], inputs.key.shape[2])
    if reason is None and fits:
        reason = policy.by_selection(keeps_all)
    if reason is not None:
        return CallPlan(size, reason)
    # in a surrounding compilation nothing orders what empties lists before what reads them
    if not fits or inputs.needs_grad or is_traced():
        return CallPlan(size, None, selector, (False,) * num_kv_heads)
    # reading lists waits, except on a CPU; a user's function may hide what dense attention sees
    reads = inputs.query.device.type == "cpu" and not in_dispatch_mode() and not selector.method.is_users
    dense = tuple([all(keeps_all[head : head + per_key]) for head in range(0, num_heads, per_key)])
    return CallPlan(size, None, selector, dense, CPU_BREAK_EVEN[inputs.query.dtype] if reads else None)


def by_head_dim(head_dim: int, v_head_dim: int, needs_grad: bool = False) -> str | None:
    """Reason why heads of these sizes run dense, if they do: no mask is made for them."""
    for name, size in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if needs_grad and size in HEAD_DIMS and size > GRADIENT_DIMS:
            return f"{name} {size} over {GRADIENT_DIMS}, with gradients"
        if size not in HEAD_DIMS:
            return f"{name} {size} outside {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    return None


def every_block_plan(reason: str, block_size: int, inputs: AttentionInputs) -> CallPlan:
    """The plan of a call that is dense for `reason`, over every visible block unless SDPA's causal kernel serves it."""
    if has_causal_kernel(inputs):
        return CallPlan(block_size, reason)
    causal = METHODS["causal"].checked(block_size, {}).for_inputs(inputs)
    return CallPlan(block_size, reason, causal, (False,) * inputs.key.shape[1])


def has_causal_kernel(inputs: AttentionInputs) -> bool:
    """True if SDPA's causal kernel serves the inputs: a whole prompt, without anything special."""
    return inputs.query.shape[2] == inputs.key.shape[2] and sdpa_serves(inputs, return_lse=False)


def notice_dense(reason: str | None, q_len: int) -> None:
    """Log why a call runs dense, if it does: once per reason, whatever its numbers. Decoding, a single row, is not logged."""
    if reason is None or q_len == 1 or is_traced():
        return
    kind = re.sub(r"\d+", "", reason)
    if kind not in _said:
        _said.add(kind)
        _log.warning("flexmask: attention ran dense: %s (logged once per process and reason)", reason)
