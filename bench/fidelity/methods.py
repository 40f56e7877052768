"""Methods under test: ``name:option=value,...`` as a function from query and key to the kept blocks.

The masks of the gallery go by their names there; `hybrid`, `coverage` and `published` are selections of `flexprefill`, and `rule`
is the workshop in which hybrid selection was found (see ``rules.py``). A method takes ``(query, key, scale)``: query (batch,
num_heads, tokens, head_dim) and key (batch, num_kv_heads, tokens, head_dim), whole prompts of a multiple of 128 tokens. What
it returns is (batch, num_heads, num_blocks, num_blocks) bool, causal, with every diagonal block. Four options fit every method:
``dense_layers=0/1`` names layers that attend to everything, ``full_rows=2`` lets so many of the last query blocks attend to
everything, ``last_near=16`` gives the last one at least its nearest 16 blocks, as `hybrid` does by itself, ``chunk=4096`` chooses
the blocks of so many rows at a time, each chunk by its own rows over the keys so far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from bench.fidelity.rules import finish, row_evidence, rule, window_and_sink
from flexmask import flexprefill_mask
from flexmask.block_masks import MASKS


@dataclass
class Method:
    """A function from query, key and scale to the kept blocks, with its options.

    Attributes
    ----------
    name
        Of `METHODS`.
    options
        Of that function.
    dense_layers
        Layers that attend to everything instead.
    full_rows
        Last query blocks that attend to everything.
    last_near
        Nearest blocks that the last query block attends to at least.
    chunk
        Rows that choose their blocks at a time; 0: all at once.
    compiled
        False: a mask of the gallery runs as plain operations, which saves its compilation. A mask that fails as compiled code is
        made by plain operations from then on.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    dense_layers: tuple[int, ...] = ()
    chunk: int = 0
    compiled: bool = True
    full_rows: int = 0
    last_near: int = 0

    def __call__(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        keep = self._in_chunks(query, key, scale)
        if self.full_rows or self.last_near:
            keep = keep.clone()  # some masks are one map for all heads
            keep[:, :, keep.shape[2] - self.full_rows :] = True
            keep[:, :, -1, max(0, keep.shape[3] - self.last_near) :] = True
            keep = finish(keep)
        return keep

    def _in_chunks(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        if not self.chunk:
            return self._keep(query, key, scale)
        ends = range(self.chunk, query.shape[2] + self.chunk, self.chunk)
        parts = [self._keep(query[:, :, end - self.chunk : end], key[:, :, :end], scale) for end in ends]
        blocks = parts[-1].shape[-1]
        return torch.cat([F.pad(part, (0, blocks - part.shape[-1])) for part in parts], 2)

    def _keep(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        if self.name in MASKS and self.compiled:
            try:
                return METHODS[self.name](query, key, scale, **self.options)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # a row made by plain operations is better than none
                print(f"{self.name} goes on uncompiled: {error!r}"[:500], flush=True)
                self.compiled = False
        if self.name not in MASKS:
            return METHODS[self.name](query, key, scale, **self.options)
        with torch.compiler.set_stance("force_eager"):
            return METHODS[self.name](query, key, scale, **self.options)


def own_mask(query: Tensor, key: Tensor, scale: float, selection: str, **options: Any) -> Tensor:
    """The blocks of the project's mask; options are those of FlexPrefillConfig."""
    mask = flexprefill_mask(query, key, scale=scale, selection=selection, **options)
    assert not isinstance(mask, tuple)
    return mask.to_dense().bool()


def hybrid(query: Tensor, key: Tensor, scale: float, **options: Any) -> Tensor:
    """``selection="hybrid"``."""
    return own_mask(query, key, scale, "hybrid", **options)


def coverage(query: Tensor, key: Tensor, scale: float, **options: Any) -> Tensor:
    """``selection="coverage"``, the paper's algorithm."""
    return own_mask(query, key, scale, "coverage", **options)


def published(query: Tensor, key: Tensor, scale: float, **options: Any) -> Tensor:
    """``selection="reference"``, the block sets of the published code."""
    return own_mask(query, key, scale, "reference", **options)


def normalised_flash_prefill(query: Tensor, key: Tensor, scale: float, alpha: float = 0.1) -> Tensor:
    """FlashPrefill with every row weighed alike: a threshold on the rows' mean attention to key means, relative to the largest.

    The published rule (``flash_prefill``) sums exponentials of scores, in which rows with large scores count for more.
    Always kept: the first two key blocks, the nearest four block diagonals, and everything in the last two query blocks.
    """
    mass = row_evidence(query, key, scale)["mean"]
    keep = mass >= alpha * mass.amax(-1, keepdim=True)
    keep = keep | window_and_sink(query.shape[2], query.device, 4, sink=2)
    keep[..., -2:, :] = True
    return finish(keep)


def of_gallery(generator: Callable[..., BlockMask], query: Tensor, key: Tensor, scale: float, **options: Any) -> Tensor:
    """The blocks of a mask of the gallery."""
    kept = generator(query, key, scale=scale, **options).to_dense().bool()
    return kept.expand(*query.shape[:2], -1, -1)


METHODS: dict[str, Callable[..., Tensor]] = {
    **{name: functools.partial(of_gallery, generator) for name, generator in MASKS.items()},
    **{function.__name__: function for function in (hybrid, coverage, published, normalised_flash_prefill, rule)},
}


def parse(text: str, compiled: bool = True) -> Method:
    """A method of ``name`` or ``name:option=value,option=value``."""
    name, _, rest = text.partition(":")
    if name not in METHODS:
        raise ValueError(f"a method must be one of {', '.join(METHODS)}; got {name!r}")
    options: dict[str, Any] = {
        option: number(value) for option, _, value in (pair.partition("=") for pair in filter(None, rest.split(",")))
    }
    layers = options.pop("dense_layers", ())
    chunk, full_rows, last_near = (options.pop(option, 0) for option in ("chunk", "full_rows", "last_near"))
    return Method(name, options, layers if isinstance(layers, tuple) else (layers,), chunk, compiled, full_rows, last_near)


def number(text: str) -> int | float | str | tuple[Any, ...]:
    """`text` as the first of these that it spells; a tuple is written ``1000/6096``."""
    if "/" in text:
        return tuple(number(part) for part in text.split("/"))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
