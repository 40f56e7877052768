"""Measure how much of the evidence of an answer a selection keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def token_spans(tokenizer: Any, text: str, characters: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The tokens [first, end) that hold these characters of a text, by a fast tokenizer."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    found = []
    for start, end in characters:
        inside = [token for token, (first, last) in enumerate(offsets) if first < end and last > start]
        found.append((inside[0], inside[-1] + 1))
    return found


def kept_blocks(mask: BlockMask, columns: Tensor) -> Tensor:
    """Mark the query blocks that keep these key blocks, bool (batch, num_heads, query_blocks, columns)."""
    kept = torch.zeros((*mask.kv_num_blocks.shape, len(columns)), dtype=torch.bool, device=columns.device)
    for counts, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        if counts is None or indices is None:
            continue
        listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        for place, column in enumerate(columns):
            kept[..., place] |= ((indices == column) & listed).any(-1)
    return kept


class Kept:
    """The shares of the evidence's key blocks that masks keep."""

    def __init__(self, tokens: Sequence[tuple[int, int]], block_size: int) -> None:
        self.block_size = block_size
        blocks = (range(first // block_size, (end - 1) // block_size + 1) for first, end in tokens)
        self.columns = sorted(set().union(*blocks))

    def shares(self, masks: Mapping[int, Sequence[BlockMask | None]], length: int, chunk: int) -> dict[str, float]:
        """`kept_last`, of the prompt's last query block, and `kept_rows`, of all that see the blocks: mean over layers and heads.

        `masks` has one for each layer and chunk; None keeps all.
        """
        last, rows = [], []
        for of_layer in masks.values():
            kept, seen = 0.0, 0
            for call, mask in enumerate(of_layer):
                first, end = call * chunk // self.block_size, -(-min(length, (call + 1) * chunk) // self.block_size)
                numbers = torch.arange(first, end)
                visible = numbers[:, None] >= torch.tensor(self.columns)
                seen += int(visible.sum())
                share = visible.float()
                if mask is not None:
                    found = kept_blocks(mask, torch.tensor(self.columns, device=mask.kv_num_blocks.device))
                    share = found.float().mean((0, 1)).cpu() * visible
                kept += float(share.sum())
            last.append(float(share[-1].mean()))
            rows.append(kept / max(1, seen))
        return {"kept_last": sum(last) / len(last), "kept_rows": sum(rows) / len(rows)}
