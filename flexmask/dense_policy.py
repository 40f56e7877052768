"""Dense or sparse, and why: the one home of that decision, for calls, layers and single heads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexmask._torch import in_dispatch_mode
from flexmask.base.checks import check_int
from flexmask.base.inputs import AttentionInputs
from flexmask.selector import Selector

# tokens of kv_len: the shortest length at which plain calls beat dense attention on every input measured (docs/performance.md)
DENSE_BELOW = 16384
# kept share of the visible blocks above which SDPA is faster than FlexAttention's CPU kernel, the mask being made:
# python -m bench.speed.cpu break-even
CPU_BREAK_EVEN = {torch.float32: 0.66, torch.float16: 0.51, torch.bfloat16: 0.43}


class DensePlan(NamedTuple):
    """The part of one call that runs dense."""

    reason: str | None  # why all of it does; None: it does not
    key_heads: list[bool]  # True for each key head that dense attention serves faster before any mask is made
    # share of a whole prompt's blocks above which a CPU's SDPA serves a key head faster; None where that does not apply
    most_kept: float | None


class DensePolicy(NamedTuple):
    """When dense attention runs instead of a selection.

    Attributes
    ----------
    dense_below
        Tokens: shorter prompts run dense. 0 switches the policy off, except for calls of fewer rows than `least_rows`.
    least_rows
        Query rows that a call needs to run sparse.
    """

    dense_below: int = DENSE_BELOW
    least_rows: int = 2

    def by_size(self, q_len: int, tokens: int) -> str | None:
        """Reason why so many rows at the end of so many tokens run dense, None where they do not."""
        if tokens < self.dense_below:
            return f"{tokens} tokens < dense_below {self.dense_below}"
        if q_len < self.least_rows:
            return f"{q_len} rows < {self.least_rows}"
        return None

    def plan(self, inputs: AttentionInputs, selector: Selector, return_lse: bool = False) -> DensePlan:
        """Decide for one call: all of it runs dense with few tokens or rows, or where every head keeps every block.

        Key heads do whose query heads keep all blocks; none in a surrounding compilation, where what empties lists and what reads
        them would be one more thing to order. To compare with `most_kept` the lists are read: on a CPU that waits for nothing.
        Elsewhere nothing may be read, and a user's function may hide what dense attention sees.
        """
        num_heads, num_kv_heads = inputs.query.shape[1], inputs.key.shape[1]
        groups, keeps_all = num_heads // num_kv_heads, selector.keeps_all
        fits = self.dense_below > 0 and not return_lse and has_causal_kernel(inputs)
        reason = self.by_size(inputs.query.shape[2], inputs.key.shape[2])
        if reason is None and fits:
            reason = self.by_selection(keeps_all)
        if reason is not None:
            return DensePlan(reason, [True] * num_kv_heads, None)
        if not fits or inputs.needs_grad or torch.compiler.is_compiling():
            return DensePlan(None, [False] * num_kv_heads, None)
        reads = inputs.query.device.type == "cpu" and not in_dispatch_mode() and not selector.method.is_users
        key_heads = [all(keeps_all[head : head + groups]) for head in range(0, num_heads, groups)]
        return DensePlan(None, key_heads, CPU_BREAK_EVEN[inputs.query.dtype] if reads else None)

    def by_selection(self, keeps_all: list[bool]) -> str | None:
        """Reason why a selection has nothing to drop, None where it may have."""
        return "every head keeps every block" if self.dense_below > 0 and all(keeps_all) else None

    def by_window(self, window: int | None) -> str | None:
        """Reason why a layer with a sliding window runs dense, None where it does not."""
        if window is None or window >= self.dense_below:
            return None
        return f"sliding window {window} < dense_below {self.dense_below}"


def has_causal_kernel(inputs: AttentionInputs) -> bool:
    """True if SDPA's causal kernel gives the attention to all that is visible: of a whole prompt, without anything special."""
    special = (inputs.softcap, inputs.window, inputs.attention_mask, inputs.offset, inputs.sinks)
    return inputs.query.shape[2] == inputs.key.shape[2] and all(x is None for x in special)


def check_dense_below(dense_below: int | None) -> int:
    """`dense_below` with its default filled in, or an error."""
    if dense_below is None:
        return DENSE_BELOW
    check_int("dense_below", dense_below)
    if dense_below < 0:
        raise ValueError(f"dense_below must be >= 0 tokens; got {dense_below}")
    return dense_below
