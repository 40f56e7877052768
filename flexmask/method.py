"""mask_method: from a function that keeps blocks to a mask generator with the core's checks, padding, chunks and lists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import without_autocast
from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.base.visibility import BlockVisibility, Tokens, block_visibility, token_validity
from flexmask.config import FlexPrefillConfig
from flexmask.flex.block_mask import block_mask
from flexmask.plain.block_lists import block_lists


@dataclass(frozen=True)
class BlockProblem:
    """One attention problem cut into blocks, as a method of `mask_method` sees it.

    Attributes
    ----------
    inputs
        The checked query and key with scale, soft cap, window, padding and offset.
    block_size
        Tokens in a block.
    tokens
        Positions of the rows, and which rows and keys are tokens.
    seen
        Which blocks hold a visible pair (``seen.visible``, (batch or 1, num_q_blocks, num_kv_blocks) bool) or no hidden one
        (``seen.full``), and the key blocks in which each query block's first and last row stand.
    """

    inputs: AttentionInputs
    block_size: int
    tokens: Tokens
    seen: BlockVisibility


def mask_method(keep: Callable[..., Tensor | None]) -> Callable[..., BlockMask]:
    """Turn ``keep(problem, **options)`` into ``<name>(query, key, *, block_size, scale, softcap, window, ..., **options)``.

    Parameters
    ----------
    keep
        From a `BlockProblem` to the kept blocks, bool, (batch or 1, num_heads or 1, num_q_blocks, num_kv_blocks), or None for
        every visible block. Blocks without a visible pair are dropped, and the block of a row's own position is added.

    Returns
    -------
    callable
        A generator of BlockMasks. It checks its arguments as `flexmask.flexprefill_mask` does.
    """

    @functools.wraps(keep, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def generate(
        query: Tensor,
        key: Tensor,
        *,
        block_size: int = 128,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        attention_mask: Tensor | None = None,
        q_offset: int | Tensor | None = None,
        **options: Any,
    ) -> BlockMask:
        FlexPrefillConfig(block_size=block_size)  # for its range
        inputs = attention_inputs(
            query, key, scale=scale, softcap=softcap, window=window, attention_mask=attention_mask, q_offset=q_offset
        ).placed()
        tokens = token_validity(query.shape[2], key.shape[2], inputs.offset, inputs.attention_mask, key)
        seen = block_visibility(tokens, block_size, window)
        with torch.no_grad(), without_autocast(query.device):
            chosen = keep(BlockProblem(inputs, block_size, tokens, seen), **options)
        visible = seen.visible[:, None]
        if chosen is None:
            kept = visible
        else:
            kv_block = torch.arange(visible.shape[-1], device=visible.device)
            own = (kv_block == seen.first_diagonal.unsqueeze(-1)) | (kv_block == seen.last_diagonal.unsqueeze(-1))
            kept = (chosen | own[:, None]) & visible
        kept = kept.expand(query.shape[0], -1, -1, -1)
        title = ", ".join(f"{name}={value}" for name, value in {"window": window, "block_size": block_size, **options}.items())
        name = f"{keep.__name__.removesuffix('_mask')}({title})"
        return block_mask(inputs, block_lists(kept, seen.full), None if chosen is None else kept, block_size, name)

    del generate.__wrapped__  # its signature is another
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in list(inspect.signature(keep).parameters.values())[1:]]
    shown = [p for p in inspect.signature(generate).parameters.values() if p.kind is not p.VAR_KEYWORD]
    signature = inspect.Signature([*shown, *own], return_annotation="BlockMask")
    generate.__signature__ = signature  # type: ignore[attr-defined]  # which inspect and help() read
    return generate
