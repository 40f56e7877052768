"""Inputs with structure, and the comparisons that the tests share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexmask.config import FlexPrefillConfig
from flexmask.flexprefill import searched
from flexmask.reference import ReferenceResult
from flexmask.search import SearchResult


def structured_inputs(
    generator: torch.Generator, batch: int, num_heads: int, num_kv_heads: int, q_len: int, kv_len: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Query and key whose heads attend to sinks, to heavy keys, along offsets, to topics, or evenly; float32.

    Every key head carries all of it, in parts of the head dimension; each query head picks its own mix.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    part = head_dim // 4
    key = normal(batch, num_kv_heads, kv_len, head_dim) * 0.3
    # positions as rotating pairs: a query turned back by an offset meets the key at that offset
    angles = torch.arange(kv_len)[:, None] * (2.0 / (1.0 + torch.arange(part // 2)) ** 1.5)
    key[..., : 2 * (part // 2)] += torch.cat([angles.cos(), angles.sin()], -1)
    heavy = (torch.rand(batch, num_kv_heads, kv_len, generator=generator) < 4 / kv_len).float()
    heavy[..., 0] = 1
    key[..., part] += 3 * heavy
    topics = normal(7, part) * 1.5
    topic_of = (torch.arange(kv_len) // max(1, int(torch.randint(8, 48, (), generator=generator)))) % 7
    key[..., -part:] += topics[topic_of]

    query = normal(batch, num_heads, q_len, head_dim) * 0.3
    position = torch.arange(kv_len - q_len, kv_len)
    strength = math.sqrt(head_dim)
    for b in range(batch):
        for h in range(num_heads):
            kind = int(torch.randint(5, (), generator=generator))
            if kind in (0, 3):
                offset = int(torch.randint(0, max(1, kv_len // 2), (), generator=generator))
                turned = angles[(position - offset).clamp(min=0)]
                query[b, h, :, : 2 * (part // 2)] += strength * torch.cat([turned.cos(), turned.sin()], -1)
            if kind in (1, 3):
                query[b, h, :, part] += strength * 0.8
            if kind == 2:
                query[b, h, :, -part:] += strength * 0.3 * topics[topic_of[position]]
    return query, key


@dataclass
class Case:
    """One call of the search: tensors and options."""

    query: Tensor
    key: Tensor
    config: FlexPrefillConfig
    scores: dict[str, Any] = field(default_factory=dict)  # scale, softcap, window
    attention_mask: Tensor | None = None
    q_offset: int | Tensor | None = None

    def keywords(self) -> dict[str, Any]:
        """Keywords of flexprefill_mask and reference_flexprefill alike, but for the config."""
        return {**self.scores, "attention_mask": self.attention_mask, "q_offset": self.q_offset}

    def reference_keywords(self) -> dict[str, Any]:
        """Keywords of reference_flexprefill."""
        config = {name: getattr(self.config, name) for name in self.config.__dataclass_fields__}
        return {**config, **self.keywords()}

    def search(self, query: Tensor | None = None, key: Tensor | None = None) -> SearchResult:
        """What the fast path chooses, with statistics."""
        query, key = self.query if query is None else query, self.key if key is None else key
        offset = self.q_offset
        if isinstance(offset, int):
            offset = torch.full((query.shape[0],), offset, device=query.device)
        scores = {"scale": None, "softcap": None, "window": None, **self.scores}
        return searched(
            query, key, self.config, attention_mask=self.attention_mask, offset=offset, with_stats=True, **scores
        )


def kept_by_lists(result: SearchResult) -> tuple[Tensor, Tensor]:
    """Partial and full blocks as bool maps, read from the index lists."""
    lists = result.lists
    return dense_map(lists.kv_num_blocks, lists.kv_indices), dense_map(lists.full_kv_num_blocks, lists.full_kv_indices)


def dense_map(counts: Tensor, indices: Tensor) -> Tensor:
    """A bool map from counts and indices, entry by entry of the first `count` of every row."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    hits = torch.zeros_like(indices).scatter_add(-1, indices.long(), listed.to(indices.dtype))
    assert hits.max() <= 1, "a block is listed twice"
    return hits.bool()


@dataclass
class Tally:
    """Decisions compared, and those whose margin is too small to demand equality."""

    decisions: int = 0
    close: int = 0

    def add(self, close: Tensor) -> None:
        self.decisions += close.numel()
        self.close += int(close.sum())

    def check(self) -> None:
        """More than 1% of close decisions would make the comparison worthless."""
        assert self.decisions > 0
        assert self.close <= max(1, 0.01 * self.decisions), f"{self.close} of {self.decisions} decisions were close"


def assert_same_blocks(result: SearchResult, expected: ReferenceResult, margin: float = 1e-5) -> Tensor:
    """Heads whose decisions all have a margin must have the same lists; returns which heads were too close to call."""
    close = expected.margin <= margin
    partial, full = kept_by_lists(result)
    clear = ~close[..., None, None]
    wrong_full = ((full.cpu() != expected.full) & clear).sum()
    wrong_partial = ((partial.cpu() != (expected.keep & ~expected.full)) & clear).sum()
    assert wrong_full == 0 and wrong_partial == 0, f"{wrong_full} full and {wrong_partial} partial blocks differ"
    assert result.stats is not None
    assert torch.equal(result.stats.is_query_aware.cpu()[~close], expected.is_query_aware[~close])
    return close
