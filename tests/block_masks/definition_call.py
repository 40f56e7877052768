"""One problem written out: tokens, blocks and scores, and choices with their margins."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.oracle import steps
from tests.oracle.visibility import Visibility

Blocks = list[int]
# of a batch row by head and query block: the kept blocks, and the margin of what decided
Definition = Callable[..., list[list[tuple[Blocks, float]]]]


@dataclass
class Call:
    """One batch row of a problem, written out."""

    query: Tensor  # (num_heads, q_len, head_dim)
    key: Tensor  # with as many heads
    seen: Visibility
    scale: float
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        self.num_heads, self.q_len, _ = self.query.shape
        self.kv_len, self.block_size = self.key.shape[1], self.seen.block_size
        self.num_q_blocks, self.num_kv_blocks = self.seen.num_q_blocks, self.seen.num_kv_blocks
        self.valid_keys = self.seen.valid_keys.nonzero().flatten().tolist()
        self.first_block = self.valid_keys[0] // self.block_size if self.valid_keys else 0
        # of the last token row
        self.last_query_block = self.seen.valid_rows[-1] // self.block_size if self.seen.valid_rows else -1

    def cap(self, score: Tensor) -> Tensor:
        return score if self.softcap is None else self.softcap * torch.tanh(score / self.softcap)

    def scores(self, h: int, rows: Blocks, keys: Tensor) -> Tensor:
        """Capped scores, (rows, keys)."""
        return self.cap(self.query[h, rows] @ keys.T * self.scale)

    def position(self, row: int) -> int:
        return self.seen.offset + row

    def rows_of(self, block: int, blocks: int = 1) -> Blocks:
        """Token rows of `blocks` query blocks."""
        return [row for row in self.seen.valid_rows if 0 <= row - block * self.block_size < blocks * self.block_size]

    def keys_of(self, block: int) -> Blocks:
        return [k for k in self.valid_keys if k // self.block_size == block]

    def mean_key(self, h: int, block: int) -> Tensor:
        keys = self.keys_of(block)
        return self.key[h, keys].mean(0) if keys else torch.zeros(self.key.shape[2], dtype=torch.float64)

    def visible_blocks(self, block: int) -> Blocks:
        return [j for i, j in self.seen.visible_blocks if i == block]

    def own_blocks(self, block: int) -> Blocks:
        """Key blocks of a query block's rows, the first row's first."""
        return self.seen.position_blocks[block]

    def attention(self, h: int, row: int) -> Tensor:
        """True attention of a token's row, (kv_len,)."""
        return self.scores(h, [row], self.key[h])[0].masked_fill(~self.seen.pairs[row], -math.inf).softmax(0)


def gap(low: float, high: float) -> float:
    """Relative distance of two compared values; infinite ones are exact."""
    if math.isinf(low) or math.isinf(high):
        return math.inf
    return abs(high - low) / max(abs(low), abs(high), 1e-30)


def top(values: dict[int, float], count: int) -> tuple[Blocks, float]:
    """The `count` largest, lower numbers first among equals, and the margin."""
    order = steps.heaviest_first(values)
    kept, rest = order[:count], order[count:]
    return kept, gap(values[rest[0]], values[kept[-1]]) if kept and rest else math.inf


def top_p(values: dict[int, float], forced: Blocks, share: float) -> tuple[Blocks, float]:
    """The forced, and the fewest others, heaviest first, that reach a share of the sum."""
    total = sum(values.values())
    kept = [j for j in forced if j in values]
    if share >= 1:
        return list(values), math.inf
    running, margin = sum(values[j] for j in kept), math.inf
    others = [j for j in steps.heaviest_first(values) if j not in kept]
    for place, j in enumerate(others):
        margin = min(margin, gap(running, share * total))
        if running >= share * total:
            if place > 0:
                margin = min(margin, gap(values[j], values[others[place - 1]]))
            break
        kept.append(j)
        running += values[j]
    return kept, margin


def static(keeps: Callable[..., bool]) -> Definition:
    """A definition from a rule about single blocks."""

    def row_of(call: Call, h: int, i: int, **options: Any) -> tuple[Blocks, float]:
        return [j for j in range(call.num_kv_blocks) if keeps(call, h, i, j, **options)], math.inf

    return by_row(row_of)


def by_row(row_of: Callable[..., tuple[Blocks, float]]) -> Definition:
    """A definition from what one query block of a head keeps."""

    def definition(call: Call, **options: Any) -> list[list[tuple[Blocks, float]]]:
        return [[row_of(call, h, i, **options) for i in range(call.num_q_blocks)] for h in range(call.num_heads)]

    return definition


def lines_of_heads(choose: Callable[..., tuple[Blocks, Blocks, float]]) -> Definition:
    """A definition from the key blocks and diagonals of one head."""

    def definition(call: Call, **options: Any) -> list[list[tuple[Blocks, float]]]:
        heads = []
        for h in range(call.num_heads):
            verticals, diagonals, margin = choose(call, h, **options)
            on = [{own - c for own in call.own_blocks(i) for c in diagonals} for i in range(call.num_q_blocks)]
            kept = [[j for j in range(call.num_kv_blocks) if j in verticals or j in blocks] for blocks in on]
            heads.append([(blocks, margin) for blocks in kept])
        return heads

    return definition


def top_lines(
    call: Call, h: int, rows: Blocks, sinks: Blocks, near: int, num_keys: float, num_offsets: float
) -> tuple[Blocks, Blocks, float]:
    """The heaviest key blocks and diagonals of so many tokens, first those of `sinks` and of the offsets under `near`."""
    size = call.block_size
    attention = torch.stack([call.attention(h, row) for row in rows])
    vertical, slash = steps.line_candidates(steps.line_mass(attention, rows, call.seen), call.seen)
    vertical |= dict.fromkeys({k // size for k in sinks} & vertical.keys(), math.inf)
    slash |= {c: math.inf for c in slash if c * size < near}
    verticals, margin = top(vertical, math.ceil(num_keys / size))
    diagonals, other = top(slash, math.ceil(num_offsets / size))
    return verticals, diagonals, min(margin, other)
