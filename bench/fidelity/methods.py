"""Methods under test: ``name:option=value,...`` as a function from query and key to the kept blocks.

`hybrid`, `coverage` and `published` are the project's own masks; XAttention and FlashPrefill are their published rules at this
block size; `rule` is the workshop in which hybrid selection was found (see ``rules.py``). A method takes ``(query, key, scale)``:
query (batch, num_heads, tokens, head_dim) and key (batch, num_kv_heads, tokens, head_dim), whole prompts of a multiple of 128
tokens. It returns (batch, num_heads, num_blocks, num_blocks) bool, causal, with every diagonal block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.fidelity.rules import causal_blocks, finish, row_evidence, rule, top_p, window_and_sink
from flexmask import flexprefill_mask

Method = Callable[[Tensor, Tensor, float], Tensor]


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


def xattention(query: Tensor, key: Tensor, scale: float, threshold: float = 0.9, stride: int = 8) -> Tensor:
    """XAttention (arXiv 2503.16428): antidiagonal scores by stride, top-p of each row of blocks after the first and own block."""
    mass = row_evidence(query, key, scale, source=f"x{stride}")["mean"]
    forced = window_and_sink(query.shape[2], query.device, 1)
    return finish(top_p(mass, threshold, forced) | forced)


def flash_prefill(query: Tensor, key: Tensor, scale: float, alpha: float = 0.1) -> Tensor:
    """FlashPrefill V1: a threshold on the rows' mean attention to key means, relative to the row's largest.

    Always kept: the first two key blocks, the nearest four block diagonals, and everything in the last two query blocks.
    """
    mass = row_evidence(query, key, scale)["mean"]
    keep = mass >= alpha * mass.amax(-1, keepdim=True)
    keep = keep | window_and_sink(query.shape[2], query.device, 4, sink=2)
    keep[..., -2:, :] = True
    return finish(keep)


def causal(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Every block, by the sparse kernel: the noise of the measure."""
    return finish(causal_blocks(query.shape[2], query.device).expand(*query.shape[:2], -1, -1))


METHODS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (hybrid, coverage, published, xattention, flash_prefill, causal, rule)
}


def parse(text: str) -> Method:
    """A method of ``name`` or ``name:option=value,option=value``."""
    name, _, rest = text.partition(":")
    if name not in METHODS:
        raise ValueError(f"a method must be one of {', '.join(METHODS)}; got {name!r}")
    options = {option: number(value) for option, _, value in (pair.partition("=") for pair in filter(None, rest.split(",")))}
    return lambda query, key, scale: METHODS[name](query, key, scale, **options)


def number(text: str) -> int | float | str:
    """`text` as the first of these that it spells."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
