"""Numbers of layers and of prefills: the layer of an attention module, the prefill that one of its calls belongs to."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn


class CallSize(NamedTuple):
    """The sizes of one call, zeros where they are not known, and its place in a pack."""

    batch: int = 0
    q_len: int = 0
    kv_len: int = 0  # tokens so far, the rows' own included, as far as the host knows
    sequence: int = 0  # of a pack


class PrefillCalls:
    """The numbers of one model's layers, and of the prefills of each layer.

    Attributes
    ----------
    numbers
        By layer index: the prefill of each recorded call, from 0.
    sizes
        By layer index: the sizes of each recorded call.
    tokens
        By layer index: tokens of all calls, those that are no longer kept included; of several calls for one sequence in a
        prefill, those of one.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, list[int]] = {}
        self.sizes: dict[int, list[CallSize]] = {}
        self.tokens: dict[int, int] = {}
        # by layer: the mask of its latest prefill, and the last sequence of its pack whose tokens are counted
        self._latest: dict[int, int | None] = {}
        self._counted: dict[int, int] = {}
        self._unnumbered: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def layer_of(self, module: nn.Module) -> int:
        """The module's `layer_idx`, else its place among the modules without one, in the order of their first calls."""
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            return layer
        return self._unnumbered.setdefault(module, len(self._unnumbered))

    def begin(self, layer: int, prefill: int | None, size: CallSize) -> None:
        """Note a call of a layer under the mask numbered `prefill`, None for one without a mask of ours.

        A layer may call attention more than once in a prefill: DiffLlama does for its two halves of the values, HRM for each
        cycle. Those calls share the mask, and so do those of packed sequences.
        """
        numbers = self.numbers.setdefault(layer, [])
        again = prefill is not None and bool(numbers) and self._latest.get(layer) == prefill
        numbers.append(numbers[-1] if again else numbers[-1] + 1 if numbers else 0)
        self.sizes.setdefault(layer, []).append(size)
        if not again or size.sequence > self._counted[layer]:
            self.tokens[layer] = self.tokens.get(layer, 0) + size.batch * size.q_len
            self._counted[layer] = size.sequence
        self._latest[layer] = prefill

    @property
    def prefills(self) -> int:
        """The number of prefills so far, of the layer that had most."""
        return max((numbers[-1] + 1 for numbers in self.numbers.values() if numbers), default=0)

    def reset(self) -> None:
        """Forget all calls; layers keep their numbers."""
        for kept in (self.numbers, self.sizes, self.tokens, self._latest, self._counted):
            kept.clear()
