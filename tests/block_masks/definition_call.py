"""One problem written out: tokens, blocks and scores, and choices with their margins."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.oracle import steps
from tests.oracle.steps import AttentionHead
from tests.oracle.visibility import Visibility

Blocks = list[int]
# of one query block of a head: the kept blocks, and the margin of what decided
Row = tuple[Blocks, float]
Definition = Callable[..., Row]


@dataclass
class Call:
    """One batch row of a problem, written out."""

    heads: list[AttentionHead]  # each query head with its keys
    seen: Visibility
    window: int | None = None

    def __post_init__(self) -> None:
        self.q_len, self.kv_len = len(self.heads[0].query), len(self.heads[0].key)
        self.block_size, self.num_kv_blocks = self.seen.block_size, self.seen.num_kv_blocks
        self.valid_keys = self.seen.valid_keys.nonzero().flatten().tolist()
        self.first_block = self.valid_keys[0] // self.block_size if self.valid_keys else 0
        # of the last token row
        self.last_query_block = self.seen.valid_rows[-1] // self.block_size if self.seen.valid_rows else -1

    def scores(self, h: int, rows: Blocks, keys: Tensor) -> Tensor:
        return self.heads[h].scores(self.heads[h].query[rows], keys)

    def score_of_mean(self, h: int, rows: Blocks, keys: Tensor) -> Tensor:
        """Capped scores of the mean row, (keys,)."""
        return self.heads[h].scores(self.heads[h].query[rows].mean(0), keys)

    def position(self, row: int) -> int:
        return self.seen.offset + row

    def keys_of(self, block: int) -> Blocks:
        return [k for k in self.valid_keys if k // self.block_size == block]

    def mean_key(self, h: int, block: int) -> Tensor:
        keys = self.keys_of(block)
        return self.heads[h].key[keys].mean(0) if keys else torch.zeros(self.heads[h].key.shape[1], dtype=torch.float64)

    def attention(self, h: int, rows: Blocks) -> Tensor:
        """True attention of token rows, (rows, kv_len)."""
        return steps.representative_attention(self.heads[h], rows, self.seen)


def gap(low: float, high: float) -> float:
    """Relative distance of two compared values; infinite ones are exact."""
    if math.isinf(low) or math.isinf(high):
        return math.inf
    return abs(high - low) / max(abs(low), abs(high), 1e-30)


def top(values: dict[int, float], count: int) -> Row:
    """The `count` largest, lower numbers first among equals, and the margin."""
    order = steps.heaviest_first(values)
    kept, rest = order[:count], order[count:]
    return kept, gap(values[rest[0]], values[kept[-1]]) if kept and rest else math.inf


def top_p(values: dict[int, float], forced: Blocks, share: float) -> Row:
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

    def definition(call: Call, h: int, i: int, **options: Any) -> Row:
        return [j for j in range(call.num_kv_blocks) if keeps(call, h, i, j, **options)], math.inf

    return definition


def on_lines(call: Call, i: int, key_blocks: Blocks, diagonals: Blocks) -> Blocks:
    return [
        j
        for j in range(call.num_kv_blocks)
        if j in key_blocks or any(own - j in diagonals for own in call.seen.position_blocks[i])
    ]


def top_lines(call: Call, h: int, i: int, rows: Blocks, sinks: Blocks, near: int, num_keys: float, num_offsets: float) -> Row:
    """The heaviest key blocks and diagonals of so many tokens, first those of `sinks` and of the offsets under `near`."""
    size = call.block_size
    vertical, slash = steps.line_candidates(steps.line_mass(call.attention(h, rows), rows, call.seen), call.seen)
    vertical |= dict.fromkeys({k // size for k in sinks} & vertical.keys(), math.inf)
    slash |= {c: math.inf for c in slash if c * size < near}
    key_blocks, margin = top(vertical, math.ceil(num_keys / size))
    diagonals, other = top(slash, math.ceil(num_offsets / size))
    return on_lines(call, i, key_blocks, diagonals), min(margin, other)
