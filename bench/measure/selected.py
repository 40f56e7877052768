"""A selection's masks and calls on one prompt, with the gamma at which it keeps a wanted share of the blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from bench.prompts.structured import Tensors
from flexmask import FlexPrefillConfig, flexprefill_attention, flexprefill_mask
from flexmask.base.inputs import attention_inputs
from flexmask.flex.head_groups import head_bytes, head_groups
from flexmask.mask import MOST_BYTES

_CLOSE_ENOUGH = 0.003
_MOST_MASKS = 16
_LEAST_GAMMA, _MOST_GAMMA = 0.5, 1 - 1e-7


class Selected:
    """One selection on one prompt.

    Heads are parted into as few groups as keep a mask under the limit of `flexprefill_mask`: the published selection's at 128k
    tokens would be refused whole.
    """

    def __init__(self, tensors: Tensors, selection: str, block_size: int) -> None:
        self.tensors = tensors
        self.options: dict[str, Any] = {"selection": selection, "block_size": block_size}
        query, key, _ = tensors
        each = head_bytes(attention_inputs(query, key), FlexPrefillConfig(0.9, **self.options))
        self._groups = head_groups(query.shape[0], query.shape[1], key.shape[1], MOST_BYTES // each)
        self._gammas: dict[float, tuple[float, float]] = {}

    def masks(self, gamma: float) -> list[BlockMask]:
        """The masks of all groups of heads, one after another."""
        query, key, _ = self.tensors
        made = (flexprefill_mask(query[:, g.query], key[:, g.key], gamma, **self.options) for g in self._groups)
        return [cast(BlockMask, mask) for mask in made]

    def call(self, gamma: float, backend: str) -> Callable[[], Tensor]:
        """The whole call, with heads in the same groups."""
        run: dict[str, Any] = {"dense_below": 0, "max_mask_bytes": MOST_BYTES, "backend": "auto" if backend == "cpu" else backend}
        query, key, value = self.tensors
        return lambda: cast(Tensor, flexprefill_attention(query, key, value, gamma, **self.options, **run))

    def density(self, gamma: float) -> float:
        """The share of the causal blocks that the masks keep."""
        return density_of(self.masks(gamma))

    def gamma_for(self, density: float) -> tuple[float, float]:
        """Gamma at which the masks keep so many blocks, or the nearest to it, and how many they do keep."""
        if density not in self._gammas:
            self._gammas[density] = self._search(density)
        return self._gammas[density]

    def _search(self, wanted: float) -> tuple[float, float]:
        # density grows with gamma, most of all close to 1
        low, high = math.log(1 - _LEAST_GAMMA), math.log(1 - _MOST_GAMMA)
        best: tuple[float, float] | None = None
        for _ in range(_MOST_MASKS):
            gamma = 1 - math.exp((low + high) / 2)
            found = self.density(gamma)
            if best is None or abs(found - wanted) < abs(best[1] - wanted):
                best = gamma, found
            if abs(found - wanted) <= _CLOSE_ENOUGH:
                break
            low, high = ((low + high) / 2, high) if found < wanted else (low, (low + high) / 2)
        assert best is not None
        return best


def density_of(masks: Sequence[BlockMask]) -> float:
    """The share of the causal blocks that masks of whole causal prompts keep, mean over heads."""
    kept, of = 0, 0
    for mask in masks:
        full = mask.full_kv_num_blocks
        kept += int(mask.kv_num_blocks.sum()) + (0 if full is None else int(full.sum()))
        blocks = mask.kv_num_blocks.shape[-1]
        of += mask.kv_num_blocks.numel() * (blocks + 1) // 2
    return kept / of
