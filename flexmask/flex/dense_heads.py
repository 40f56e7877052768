"""Heads that dense attention serves faster than the sparse kernel: those at gamma 1, and on CPUs those that keep most blocks.

They go by key head, with its query heads. The mask of all heads is made as ever, so that no number of heads is a compilation of
its own; then the lists of dense heads are emptied, the sparse kernel skips them, and SDPA fills their outputs.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import block_mask_from_lists, in_dispatch_mode
from flexmask.base.inputs import AttentionInputs, HeadGroup
from flexmask.config import FlexPrefillConfig
from flexmask.flex.dense import dense_attention

# kept share of the visible blocks above which SDPA is faster than FlexAttention's CPU kernel, the mask being made:
# python -m bench.cpu_break_even
CPU_BREAK_EVEN = {torch.float32: 0.66, torch.float16: 0.51, torch.bfloat16: 0.43}


def has_causal_kernel(inputs: AttentionInputs) -> bool:
    """True if SDPA's causal kernel gives the attention to all that is visible: of a whole prompt, without anything special."""
    special = (inputs.softcap, inputs.window, inputs.attention_mask, inputs.offset, inputs.sinks)
    return inputs.query.shape[2] == inputs.key.shape[2] and all(x is None for x in special)


def at_gamma_one(inputs: AttentionInputs, config: FlexPrefillConfig) -> list[bool]:
    """Tell, by key head, if all its query heads keep all their blocks, as far as the host knows: reads no tensor."""
    num_heads, num_kv_heads = inputs.query.shape[1], inputs.key.shape[1]
    gamma = config.gamma if inputs.gamma is None else inputs.gamma
    # the published rule counts tokens, and keeps less at gamma 1 in small blocks
    if isinstance(gamma, Tensor) or config.max_budget is not None or config.selection == "reference":
        return [False] * num_kv_heads
    if not isinstance(gamma, tuple):
        return [gamma == 1] * num_kv_heads
    groups = num_heads // num_kv_heads
    return [all(share == 1 for share in gamma[head : head + groups]) for head in range(0, num_heads, groups)]


def above_break_even(mask: BlockMask, inputs: AttentionInputs) -> list[bool]:
    """Tell, by key head, if its query heads keep so much of a whole prompt that a CPU's SDPA is faster.

    Reads the lists: on a CPU that waits for nothing. Elsewhere, and where nothing may be read, no head is.
    """
    num_kv_heads, counts, full_counts = inputs.key.shape[1], mask.kv_num_blocks, mask.full_kv_num_blocks
    assert full_counts is not None
    if counts.device.type != "cpu" or torch.compiler.is_compiling() or in_dispatch_mode():
        return [False] * num_kv_heads
    q_blocks = counts.shape[2]
    visible = counts.shape[0] * counts.shape[1] // num_kv_heads * q_blocks * (q_blocks + 1) / 2
    kept = (counts + full_counts).sum((0, 2)).unflatten(0, (num_kv_heads, -1)).sum(1)
    return [number > CPU_BREAK_EVEN[inputs.query.dtype] * visible for number in kept.tolist()]


def runs_of(key_heads: list[bool]) -> tuple[slice, ...]:
    """The True entries as slices, one a run."""
    runs = [list(run) for is_dense, run in groupby(range(len(key_heads)), key=lambda head: key_heads[head]) if is_dense]
    return tuple(slice(run[0], run[-1] + 1) for run in runs)


def query_heads(inputs: AttentionInputs, key_heads: slice) -> slice:
    """The query heads of key heads."""
    groups = inputs.query.shape[1] // inputs.key.shape[1]
    return slice(key_heads.start * groups, key_heads.stop * groups)


def without_heads(mask: BlockMask, heads: list[slice]) -> BlockMask:
    """`mask` with empty lists in some query heads; the lists of the others are shared."""
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    counts, full_counts = mask.kv_num_blocks.clone(), mask.full_kv_num_blocks.clone()
    for each in heads:
        counts[:, each] = 0
        full_counts[:, each] = 0
    lists = (counts, mask.kv_indices, full_counts, mask.full_kv_indices)
    q_len, kv_len = mask.shape[-2:]
    return block_mask_from_lists(lists, mask.mask_mod, mask.BLOCK_SIZE[0], (q_len, kv_len))


def attend_densely(out: Tensor, inputs: AttentionInputs, key_heads: tuple[slice, ...]) -> None:
    """Write dense attention of some key heads and their query heads to its place in `out`."""
    for keys in key_heads:
        heads = query_heads(inputs, keys)
        out[:, heads] = dense_attention(inputs.of_heads(HeadGroup(slice(None), heads, keys)))[0]
