"""Numbers of layers and of prefills: the layer of an attention module, the prefill that one of its calls belongs to."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn


class PrefillCalls:
    """The numbers of one model's layers, and of the prefills of each layer.

    Attributes
    ----------
    numbers
        By layer index: the prefill of each recorded call, from 0.
    sequences
        By layer index: the sequence of each recorded call in its pack, from 0; 0 for what is not packed.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, list[int]] = {}
        self.sequences: dict[int, list[int]] = {}
        # by layer: the mask of its latest prefill
        self._latest: dict[int, int | None] = {}
        self._unnumbered: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def layer_of(self, module: nn.Module) -> int:
        """The module's `layer_idx`, else its place among the modules without one, in the order of their first calls."""
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            return layer
        return self._unnumbered.setdefault(module, len(self._unnumbered))

    def begin(self, layer: int, prefill: int | None, sequence: int = 0) -> None:
        """Note a call of a layer under the mask numbered `prefill`, None for one without a mask of ours.

        A layer may call attention more than once in a prefill: DiffLlama does for its two halves of the values, HRM for each
        cycle. Those calls share the mask, and so do those of packed sequences.
        """
        numbers = self.numbers.setdefault(layer, [])
        again = prefill is not None and numbers and self._latest.get(layer) == prefill
        numbers.append(numbers[-1] if again else numbers[-1] + 1 if numbers else 0)
        self._latest[layer] = prefill
        self.sequences.setdefault(layer, []).append(sequence)
