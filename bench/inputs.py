"""Seeded queries and keys with structure: sinks, heavy keys, bands along offsets and topics, by a recipe per head.

Gaussian noise alone has no structure to find: every block weighs the same, and any mask of it means nothing. Here the heads of a
key group take the recipes of `RECIPES` in turn, so that a quarter of all heads follow topics (query-aware).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RECIPES = ("heavy", "bands", "topics", "heavy")
_BLOCK = 128
_POSITION_DIMS = 32
_TOPIC_DIMS = 64
_HEAVY_DIM, _SINK_DIM = 32, 33
_MASS = 0.99  # share of a row's attention that its recipe gets; the rest is spread over all keys


def structured_prompt(
    length: int,
    density: float,
    *,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    recipes: tuple[str, ...] = RECIPES,
    seed: int = 0,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of one prompt on which gamma = 0.9 keeps about `density` of the visible blocks.

    Parameters
    ----------
    length
        Tokens.
    density
        Share of the visible blocks to aim at, for blocks of 128 tokens; what a run measures is printed beside its times.
    num_heads, num_kv_heads, head_dim
        Default: the shape of Llama-3.1-8B.
    recipes
        Kinds of head, by turns within each group: "heavy" (a few keys that all rows attend to), "bands" (keys at certain
        distances), "topics" (keys of the row's own topic).
    seed, device, dtype
        Of the tensors.

    Returns
    -------
    tuple of Tensor
        query (1, num_heads, length, head_dim), key and value (1, num_kv_heads, length, head_dim).
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    blocks = math.ceil(length / _BLOCK)
    position = torch.arange(length, device=device)
    groups = num_heads // num_kv_heads
    # a heavy key costs one key block and, its offsets running over a whole block of rows, two block diagonals
    num_heavy = max(2, round(density * blocks / 2.6))
    num_bands = max(1, round(density * blocks / 26))
    num_topics = max(2, round(0.92 / density))
    segment = position // (5 * _BLOCK)

    frequencies = 2 * math.pi / torch.logspace(math.log10(8 * _BLOCK), math.log10(4 * length), _POSITION_DIMS // 2)
    angles = position[:, None] * frequencies.to(device)
    code = torch.cat([angles.cos(), angles.sin()], -1)
    topics = torch.sign(normal(num_topics, _TOPIC_DIMS)) / math.sqrt(_TOPIC_DIMS)

    query = torch.empty(1, num_heads, length, head_dim, dtype=dtype, device=device)
    key = torch.empty(1, num_kv_heads, length, head_dim, dtype=dtype, device=device)
    for kv_head in range(num_kv_heads):
        features = normal(length, head_dim) * 0.02
        features[:, :_POSITION_DIMS] += code
        heavy_blocks = uniform(blocks).argsort()[:num_heavy]
        heavy = (heavy_blocks * _BLOCK + (uniform(num_heavy) * _BLOCK).long()).clamp(max=length - 1)
        features[heavy, _HEAVY_DIM] += 1
        features[:4, _SINK_DIM] += 1
        topic_of = (uniform(int(segment[-1]) + 1) * num_topics).long()[segment]
        features[:, -_TOPIC_DIMS:] += topics[topic_of]
        key[0, kv_head] = features

        for member in range(groups):
            recipe = recipes[member % len(recipes)]
            # scores are multiplied by 1 / sqrt(head_dim) in attention
            odds = _MASS / (1 - _MASS)
            row = normal(length, head_dim) * 0.02
            if recipe == "heavy":
                row[:, _HEAVY_DIM] += math.sqrt(head_dim) * math.log(odds * length / num_heavy)
                row[:, _SINK_DIM] += math.sqrt(head_dim) * math.log(length / num_heavy)
            elif recipe == "bands":
                offsets = (uniform(num_bands) ** 2 * length * 0.8).long()
                for offset in [0, *offsets.tolist()]:
                    row[:, :_POSITION_DIMS] += 2.0 * code[(position - offset).clamp(min=0)]
                row[:, :_POSITION_DIMS] *= math.sqrt(head_dim) * 0.5
            elif recipe == "topics":
                row[:, -_TOPIC_DIMS:] += math.sqrt(head_dim) * math.log(odds * num_topics) * topics[topic_of]
            else:
                raise ValueError(f"recipes must hold 'heavy', 'bands' or 'topics'; got {recipe!r}")
            query[0, kv_head * groups + member] = row
    value = normal(1, num_kv_heads, length, head_dim).to(dtype)
    return query, key, value
