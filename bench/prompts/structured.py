"""Seeded queries and keys with sinks, heavy keys, bands and topics, one recipe per head.

Gaussian noise spreads its mass evenly over blocks and cannot test a selection. A quarter of the heads follow topics
(query-aware).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import ON_GPU

# Llama-3.1-8B's, and a small one for CPUs
SHAPE: dict[str, Any] = (
    {"num_heads": 32, "num_kv_heads": 8, "device": "cuda", "dtype": torch.bfloat16}
    if ON_GPU
    else {"num_heads": 8, "num_kv_heads": 2, "device": "cpu", "dtype": torch.float32}
)
RECIPES = ("heavy", "bands", "topics", "heavy")
# tokens generated at a time: no float32 tensor is longer
CHUNK = 65536
_POSITION_DIMS = 32
_TOPIC_DIMS = 64
_HEAVY_DIM, _SINK_DIM = 32, 33
_MIN_HEAD_DIM = _SINK_DIM + 1 + _TOPIC_DIMS
_MASS = 0.99  # share of a row's attention that goes to its recipe; the rest spreads over all keys
# A head is query-aware if its block means predict its last rows. They err on the diagonal block, which is half visible,
# by about 0.2 / sqrt(blocks per topic) in Jensen-Shannon distance. With eight blocks that is 0.07, below the default tau of 0.1.
_MIN_TOPIC_BLOCKS = 8


Tensors = tuple[Tensor, Tensor, Tensor]
"""query, key and value"""


@dataclass(frozen=True)
class _Group:
    """Structure of one key-value group."""

    length: int
    frequencies: Tensor  # (_POSITION_DIMS / 2,) of the positions' code
    heavy: Tensor  # (num_heavy,) positions
    offsets: Tensor  # (num_bands,) distances
    topics: Tensor  # (num_topics, topic_dims)
    topic_of_segment: Tensor  # (num_segments,)


def named_density(tokens: int) -> float:
    """Density of the structured workload by length."""
    return 0.2 if tokens < 131072 else 0.15 if tokens < 524288 else 0.08


def structured_prompt(
    length: int,
    density: float,
    *,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    recipes: tuple[str, ...] = RECIPES,
    block_size: int = 128,
    seed: int = 0,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensors:
    """Generate query, key and value on which gamma = 0.9 keeps very roughly `density` of the visible blocks.

    Parameters
    ----------
    length
        Tokens, filled in chunks of `CHUNK`.
    density
        > 0. More means more heavy keys and bands, and fewer topics. Fractional counts are spread over the key-value groups.
    num_heads, num_kv_heads, head_dim
        Default: Llama-3.1-8B's. head_dim >= 98.
    recipes
        Kinds of head, cycled within each group: "heavy" (few keys that all rows attend to), "bands" (fixed distances), "topics"
        (keys of the row's topic).
    block_size
        Tokens; the grid of heavy keys and topics.

    Returns
    -------
    tuple of Tensor
        query (1, num_heads, length, head_dim), key and value (1, num_kv_heads, length, head_dim).
    """
    if head_dim < _MIN_HEAD_DIM:
        raise ValueError(f"head_dim must be >= {_MIN_HEAD_DIM}, to fit positions and topics; got {head_dim}")
    generator = torch.Generator(device).manual_seed(seed)
    per_group = num_heads // num_kv_heads

    query = torch.empty(1, num_heads, length, head_dim, dtype=dtype, device=device)
    key = torch.empty(1, num_kv_heads, length, head_dim, dtype=dtype, device=device)
    value = torch.empty_like(key)
    for kv_head in range(num_kv_heads):
        group = _group(length, density, block_size, (kv_head + 0.5) / num_kv_heads, generator)
        for first in range(0, length, CHUNK):
            position = torch.arange(first, min(first + CHUNK, length), device=device)
            topic = group.topics[group.topic_of_segment[position // (2 * block_size)]]  # (chunk, topic_dims)
            rows = slice(first, first + len(position))

            features = _noise(position, head_dim, generator)
            features[:, :_POSITION_DIMS] += _code(position, group.frequencies)
            features[:, _HEAVY_DIM] += torch.isin(position, group.heavy)
            features[:, _SINK_DIM] += position < 4
            features[:, -_TOPIC_DIMS:] += topic
            key[0, kv_head, rows] = features
            value[0, kv_head, rows] = _noise(position, head_dim, generator) * 50

            for member in range(per_group):
                row = _noise(position, head_dim, generator)
                _add_recipe(recipes[member % len(recipes)], row, position, topic, group)
                query[0, kv_head * per_group + member, rows] = row
    return query, key, value


def _group(length: int, density: float, block_size: int, rounding: float, generator: torch.Generator) -> _Group:
    device = generator.device
    blocks = math.ceil(length / block_size)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    # a heavy key costs one key block and two block diagonals, since its offsets span a whole block of rows
    num_heavy = min(blocks, max(1, int(density * blocks / 2.6 + rounding)))
    num_bands = max(1, int(density * blocks / 26 + rounding))
    num_topics = max(1, min(int(0.92 / density + rounding), blocks // _MIN_TOPIC_BLOCKS))
    heavy_blocks = uniform(blocks).argsort()[:num_heavy]
    heavy = (heavy_blocks * block_size + (uniform(num_heavy) * block_size).long()).clamp(max=length - 1)
    offsets = (uniform(num_bands) ** 2 * length * 0.8).long()
    topics = torch.randn(num_topics, _TOPIC_DIMS, generator=generator, device=device).sign() / math.sqrt(_TOPIC_DIMS)
    # Segments of two blocks, divided evenly among the topics; the last segment's topic has as many as any.
    num_segments = math.ceil(blocks / 2)
    order = uniform(num_segments).argsort()
    topic_of_segment = (order - order[-1]) % num_segments % num_topics
    wavelengths = torch.logspace(math.log10(8 * block_size), math.log10(4 * length), _POSITION_DIMS // 2)
    return _Group(length, (2 * math.pi / wavelengths).to(device), heavy, offsets, topics, topic_of_segment)


def _noise(position: Tensor, head_dim: int, generator: torch.Generator) -> Tensor:
    return torch.randn(len(position), head_dim, generator=generator, device=position.device) * 0.02


def _code(position: Tensor, frequencies: Tensor) -> Tensor:
    angles = position.unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def _add_recipe(recipe: str, row: Tensor, position: Tensor, topic: Tensor, group: _Group) -> None:
    """Point the queries `row` (chunk, head_dim) at the keys of `recipe`, in place."""
    # attention will scale the scores by 1 / sqrt(head_dim)
    root, odds = math.sqrt(row.shape[1]), _MASS / (1 - _MASS)
    if recipe == "heavy":
        row[:, _HEAVY_DIM] += root * math.log(odds * group.length / len(group.heavy))
        row[:, _SINK_DIM] += root * math.log(group.length / len(group.heavy))
    elif recipe == "bands":
        for offset in [0, *group.offsets.tolist()]:
            row[:, :_POSITION_DIMS] += root * _code((position - offset).clamp(min=0), group.frequencies)
    elif recipe == "topics":
        row[:, -_TOPIC_DIMS:] += root * math.log(odds * max(2, len(group.topics))) * topic
    else:
        raise ValueError(f"recipes must hold 'heavy', 'bands' or 'topics'; got {recipe!r}")
