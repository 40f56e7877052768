"""One problem written out: tokens, blocks and scores, and choices with their margins."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Blocks = list[int]


@dataclass
class Call:
    """One problem, written out."""

    query: Tensor
    key: Tensor  # with as many heads as query
    visible: Tensor  # (batch, q_len, kv_len) bool
    position: list[list[int]]  # of each row, by batch row
    valid_keys: list[list[int]]  # positions of the keys that are filled tokens
    block_size: int
    window: int | None
    softcap: float | None
    scale: float

    def __post_init__(self) -> None:
        self.batch, self.num_heads, self.q_len, _ = self.query.shape
        self.kv_len = self.key.shape[2]
        self.num_q_blocks = -(-self.q_len // self.block_size)
        self.num_kv_blocks = -(-self.kv_len // self.block_size)
        self.row_is_token = [[p in set(keys) for p in rows] for rows, keys in zip(self.position, self.valid_keys, strict=True)]

    def empty(self) -> tuple[Tensor, Tensor]:
        shape = (self.batch, self.num_heads, self.num_q_blocks, self.num_kv_blocks)
        return torch.zeros(shape, dtype=torch.bool), torch.full(shape[:3], math.inf)

    def cap(self, score: Tensor) -> Tensor:
        return score if self.softcap is None else self.softcap * torch.tanh(score / self.softcap)

    def scores(self, b: int, h: int, rows: list[int], keys: Tensor) -> Tensor:
        """Capped scores, (rows, keys)."""
        return self.cap(self.query[b, h, rows] @ keys.T * self.scale)

    def rows_of(self, b: int, block: int, blocks: int = 1) -> list[int]:
        """Token rows of `blocks` query blocks."""
        first = block * self.block_size
        rows = range(first, min(first + blocks * self.block_size, self.q_len))
        return [row for row in rows if self.row_is_token[b][row]]

    def keys_of(self, b: int, block: int) -> Blocks:
        return [k for k in self.valid_keys[b] if k // self.block_size == block]

    def first_block(self, b: int) -> int:
        return self.valid_keys[b][0] // self.block_size if self.valid_keys[b] else 0

    def mean_key(self, b: int, h: int, block: int) -> Tensor:
        keys = self.keys_of(b, block)
        return self.key[b, h, keys].mean(0) if keys else torch.zeros(self.key.shape[3], dtype=torch.float64)

    def sees(self, b: int, block: int, kv_block: int) -> bool:
        size = self.block_size
        return bool(self.visible[b, block * size : (block + 1) * size, kv_block * size : (kv_block + 1) * size].any())

    def visible_blocks(self, b: int, block: int) -> Blocks:
        return [j for j in range(self.num_kv_blocks) if self.sees(b, block, j)]

    def first_row_block(self, b: int, block: int) -> int:
        """Key block of a query block's first row."""
        return self.position[b][block * self.block_size] // self.block_size

    def own_blocks(self, b: int, block: int) -> Blocks:
        last = min((block + 1) * self.block_size, self.q_len) - 1
        return sorted({self.first_row_block(b, block), self.position[b][last] // self.block_size})

    def last_query_block(self, b: int) -> int:
        """Query block of the last token row."""
        rows = [row for row in range(self.q_len) if self.row_is_token[b][row]]
        return rows[-1] // self.block_size if rows else -1

    def attention(self, b: int, h: int, row: int) -> Tensor:
        """True attention of one row, (kv_len,); zeros where it sees nothing."""
        seen = self.visible[b, row]
        out = torch.zeros(self.kv_len, dtype=torch.float64)
        if seen.any():
            out[seen] = self.scores(b, h, [row], self.key[b, h])[0][seen].softmax(0)
        return out

    def last_rows(self, b: int, count: int) -> list[int]:
        return [row for row in range(self.q_len) if self.row_is_token[b][row]][-count:]


def make_call(
    query: Tensor, key: Tensor, visible: Tensor, offsets: Tensor, is_token: Tensor, block_size: int, **scores: Any
) -> Call:
    groups = query.shape[1] // key.shape[1]
    q_len, kv_len = query.shape[2], key.shape[2]
    position = [[int(offset) + t for t in range(q_len)] for offset in offsets]
    filled = [[k for k in range(kv_len) if is_token[b, k] and k < int(offsets[b]) + q_len] for b in range(query.shape[0])]
    given = {"window": None, "softcap": None, "scale": query.shape[3] ** -0.5, **scores}
    return Call(query.double(), key.double().repeat_interleave(groups, 1), visible, position, filled, block_size, **given)


def gap(low: float, high: float) -> float:
    """Relative distance of two compared values; infinite ones are exact."""
    if math.isinf(low) or math.isinf(high):
        return math.inf
    return abs(high - low) / max(abs(low), abs(high), 1e-30)


def top(values: dict[int, float], count: int) -> tuple[Blocks, float]:
    """The `count` largest, lower numbers first among equals, and the margin."""
    order = sorted(values, key=lambda j: (-values[j], j))
    kept, rest = order[:count], order[count:]
    return kept, gap(values[rest[0]], values[kept[-1]]) if kept and rest else math.inf


def top_p(values: dict[int, float], forced: Blocks, share: float) -> tuple[Blocks, float]:
    """The forced, and the fewest others, heaviest first, that reach a share of the sum."""
    total = sum(values.values())
    kept = [j for j in forced if j in values]
    if share >= 1:
        return list(values), math.inf
    running, margin = sum(values[j] for j in kept), math.inf
    others = sorted((j for j in values if j not in kept), key=lambda j: (-values[j], j))
    for place, j in enumerate(others):
        margin = min(margin, gap(running, share * total))
        if running >= share * total:
            if place > 0:
                margin = min(margin, gap(values[j], values[others[place - 1]]))
            break
        kept.append(j)
        running += values[j]
    return kept, margin


def static(keeps: Callable[..., bool]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A definition from a rule about single blocks."""

    def row_of(call: Call, b: int, h: int, i: int, **options: Any) -> tuple[Blocks, float]:
        return [j for j in range(call.num_kv_blocks) if keeps(call, b, h, i, j, **options)], math.inf

    return by_row(row_of)


def by_row(row_of: Callable[..., tuple[Blocks, float]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A definition from what one query block keeps."""

    def definition(call: Call, **options: Any) -> tuple[Tensor, Tensor]:
        keep, margin = call.empty()
        for b in range(call.batch):
            for h in range(call.num_heads):
                for i in range(call.num_q_blocks):
                    kept, margin[b, h, i] = row_of(call, b, h, i, **options)
                    keep[b, h, i, kept] = True
        return keep, margin

    return definition


def line_blocks(call: Call, b: int, i: int, verticals: Blocks, diagonals: Blocks) -> Blocks:
    on = {own - c for own in call.own_blocks(b, i) for c in diagonals}
    return [j for j in range(call.num_kv_blocks) if j in verticals or j in on]


def line_masses(call: Call, b: int, h: int, rows: list[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Attention of the rows by key block and block diagonal; a slash is split over the two diagonals it crosses."""
    size = call.block_size
    seen = [(i, j) for i in range(call.num_q_blocks) for j in range(call.num_kv_blocks) if call.sees(b, i, j)]
    vertical = dict.fromkeys(sorted({j for _, j in seen}), 0.0)
    slash = dict.fromkeys(sorted({own - j for i, j in seen for own in call.own_blocks(b, i) if own >= j}), 0.0)
    for row in rows:
        p = call.attention(b, h, row)
        for k in range(call.kv_len):
            if p[k] == 0:
                continue
            vertical[k // size] += float(p[k])
            offset = call.position[b][row] - k
            c, x = divmod(offset, size)
            for diagonal, share in ((c, 1 - x / size), (c + 1, x / size)):
                if diagonal in slash:
                    slash[diagonal] += float(p[k]) * share
    return vertical, slash


def lines_of_heads(choose: Callable[..., tuple[Blocks, Blocks, float]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A definition from the key blocks and diagonals of one head."""

    def definition(call: Call, **options: Any) -> tuple[Tensor, Tensor]:
        keep, margin = call.empty()
        for b in range(call.batch):
            for h in range(call.num_heads):
                verticals, diagonals, margin[b, h] = choose(call, b, h, **options)
                for i in range(call.num_q_blocks):
                    keep[b, h, i, line_blocks(call, b, i, verticals, diagonals)] = True
        return keep, margin

    return definition
