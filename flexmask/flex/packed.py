"""Dense attention of packed sequences: in shared FlexAttention calls on GPUs, one SDPA call per sequence on CPUs."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.checks import HEAD_DIMS
from flexmask.base.inputs import AttentionInputs, without_autocast
from flexmask.base.selection import block_lists
from flexmask.compilation import runs_uncompiled
from flexmask.flex.backend import Backend, chosen_backend
from flexmask.flex.block_mask import block_mask_from_lists, captured
from flexmask.flex.dense import dense_attention, has_fused_kernel, sdpa_serves
from flexmask.flex.run import run_flex_attention

_BLOCK = 128
# blocks of rows and of keys that one call copies
_MAX_BLOCKS = 1024

Result = tuple[Tensor, Tensor | None]


class Segment(NamedTuple):
    """One sequence of a pack; its query rows are at its last keys."""

    query: slice
    key: slice

    @property
    def q_len(self) -> int:
        return int(self.query.stop - self.query.start)

    @property
    def kv_len(self) -> int:
        return int(self.key.stop - self.key.start)

    def slice_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        """The inputs of this sequence, as views of the pack's."""
        value = None if inputs.value is None else inputs.value[:, :, self.key]
        return inputs.with_fields(query=inputs.query[:, :, self.query], key=inputs.key[:, :, self.key], value=value)


def dense_attention_packed(
    inputs: AttentionInputs, segments: list[Segment], return_lse: bool = False, backend: str = "auto"
) -> list[Result]:
    """Dense attention of each segment of a pack to itself, (1, num_heads, q_len, v_head_dim), with log-sum-exp if requested."""
    query, value = inputs.query, inputs.value
    assert value is not None
    together = query.is_cuda and query.shape[3] in HEAD_DIMS and value.shape[3] in HEAD_DIMS and not runs_uncompiled(query)
    # a captured graph would replay the copy of a freed table
    together = together and not torch.cuda.is_current_stream_capturing()
    done: dict[int, Result] = {}
    calls = _shared_calls(inputs, segments, return_lse) if together else []
    chosen = Backend("triton")  # of "auto" too (docs/packed.md)
    if calls and backend == "flash":
        # the window is in the lists; the mask_mod captures tensors, as the mask_mod of an offset does
        like = inputs.with_fields(window=None, offset=query.new_zeros(1, dtype=torch.int32))
        chosen = chosen_backend(backend, like, _BLOCK, return_lse, shares_lists=True)
    for indices in calls:
        part = [segments[index] for index in indices]
        with without_autocast(query.device):
            outs = attention_in_one_call(inputs, part, chosen.name, return_lse, chosen.lse_factor)
        done.update(zip(indices, outs, strict=True))
    return [
        done[index] if index in done else dense_attention(segment.slice_inputs(inputs), return_lse)
        for index, segment in enumerate(segments)
    ]


def attention_in_one_call(
    inputs: AttentionInputs, segments: list[Segment], backend: str, return_lse: bool = False, lse_factor: float = 1.0
) -> list[Result]:
    """Dense attention of all segments by one FlexAttention call under a block-diagonal mask."""
    value = inputs.value
    assert value is not None
    # each sequence is copied to begin at a block: a weight of 0 would not hide NaN in another's values
    tables = _block_tables(segments, inputs.query.device)
    within = torch.arange(_BLOCK, device=inputs.query.device)
    rows, keys = ((table[:, :1] + within).clamp(max=table[:, 1:2] - 1).flatten() for table in tables)
    aligned = inputs.with_fields(
        query=inputs.query.index_select(2, rows), key=inputs.key.index_select(2, keys), value=value.index_select(2, keys)
    )
    mask = _mask(*tables, inputs.window, inputs.needs_grad)
    out, lse = run_flex_attention(aligned.with_fields(window=None), mask, backend, return_lse, lse_factor)
    # a copy, which frees the rows that fill up blocks
    lengths = [segment.q_len for segment in segments]
    rows = _sequence_rows(lengths, out.device)
    outs = out.index_select(2, rows).split(lengths, 2)
    lses = [None] * len(segments) if lse is None else lse.index_select(2, rows).split(lengths, 2)
    return list(zip(outs, lses, strict=True))


def _sequence_rows(lengths: list[int], device: torch.device) -> Tensor:
    """Places of the sequences' rows among rows that are padded to whole blocks."""
    filled_before = [0, *itertools.accumulate(-length % _BLOCK for length in lengths)][:-1]
    table = _on_device([filled_before, lengths], device)
    total = sum(lengths)
    return torch.arange(total, device=device) + table[0].repeat_interleave(table[1], output_size=total)


def _block_tables(segments: list[Segment], device: torch.device) -> tuple[Tensor, Tensor]:
    """The contents of blocks of aligned sequences, int32: by query block (num_q_blocks, 5), by key block (num_kv_blocks, 2).

    Each row has the block's first row or key in the pack, and where its sequence ends there. A query block also has, in the
    aligned copy, the position of its first row, and where its keys begin and end.
    """
    rows: list[tuple[int, ...]] = []
    keys: list[tuple[int, ...]] = []
    for segment in segments:
        first = len(keys) * _BLOCK
        position = first + segment.kv_len - segment.q_len
        for start in range(0, segment.q_len, _BLOCK):
            rows.append((segment.query.start + start, segment.query.stop, position + start, first, first + segment.kv_len))
        for start in range(0, segment.kv_len, _BLOCK):
            keys.append((segment.key.start + start, segment.key.stop, 0, 0, 0))
    table = _on_device([*rows, *keys], device)
    return table[: len(rows)], table[len(rows) :, :2]


def _on_device(table: list[Any], device: torch.device) -> Tensor:
    """The table in int32, without a wait."""
    return torch.tensor(table, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _mask(rows: Tensor, keys: Tensor, window: int | None, with_gradients: bool) -> BlockMask:
    """The mask of aligned sequences. Rows past the end of a sequence see what its last row sees."""
    within = torch.arange(_BLOCK, device=rows.device, dtype=torch.int32)
    position, first, end = rows[:, 2:].split(1, 1)
    last = torch.minimum(position + within, end - 1)
    first = first.expand_as(last)
    if window is not None:
        first = torch.maximum(first, last - (min(window, 2**31 - 1) - 1))
    start = torch.arange(len(keys), device=last.device, dtype=torch.int32) * _BLOCK
    end = start + _BLOCK - 1
    # both edges ascend
    keep = (end >= first[:, :1]) & (start <= last[:, -1:])
    full = (start >= first[:, -1:]) & (end <= last[:, :1])
    lists = block_lists(keep[None, None], full[None])
    lengths = (len(rows) * _BLOCK, len(keys) * _BLOCK)
    first, last = captured(first.flatten()), captured(last.flatten())

    def own_sequence(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx >= first[q_idx]) & (kv_idx <= last[q_idx])

    return block_mask_from_lists(lists, own_sequence, _BLOCK, lengths, with_gradients)


def _shared_calls(inputs: AttentionInputs, segments: list[Segment], return_lse: bool) -> list[list[int]]:
    """Indices of the sequences of each call: at most `_MAX_BLOCKS` blocks, or one sequence.

    Single rows are left out, and so is what SDPA takes as it is.
    """
    calls: list[list[int]] = []
    blocks = 0
    for index, segment in enumerate(segments):
        if segment.q_len > 1:
            more = -(-segment.q_len // _BLOCK) + -(-segment.kv_len // _BLOCK)
            if not calls or blocks + more > _MAX_BLOCKS:
                calls.append([])
                blocks = 0
            calls[-1].append(index)
            blocks += more
    if sum(len(call) for call in calls) < 2:
        return []
    assert inputs.value is not None
    fused = has_fused_kernel(inputs.query, inputs.key, inputs.value)
    return [
        call for call in calls if len(call) > 1 or not (fused and sdpa_serves(segments[call[0]].slice_inputs(inputs), return_lse))
    ]
