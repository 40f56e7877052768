"""The steps of FlexPrefill, each as the paper defines it, in the order in which `tests.oracle.flexprefill` takes them.

Shapes are those of one head: ``query`` is (q_len, head_dim), ``key`` (kv_len, head_dim), everything float64.
"""

import math
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tests.oracle.visibility import Block, Visibility

Candidate = TypeVar("Candidate", int, Block)


class AttentionHead(NamedTuple):
    """One head's queries, keys and score options."""

    query: Tensor
    key: Tensor
    scale: float
    softcap: float | None

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Capped scores of rows with keys."""
        return self.capped(query @ key.T * self.scale)

    def capped(self, scores: Tensor) -> Tensor:
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


def representative_rows(which: str, seen: Visibility) -> list[int]:
    """The last or middle B valid query rows, or all of them when there are fewer (Q-hat)."""
    rows, size = seen.valid_rows, seen.block_size
    if which == "last":
        return rows[-size:]
    start = max(0, (len(rows) - size) // 2)
    return rows[start : start + size]


def representative_attention(head: AttentionHead, rows: list[int], seen: Visibility) -> Tensor:
    """Softmax attention p of the rows, (len(rows), kv_len) (A-hat)."""
    scores = head.scores(head.query[rows], head.key)
    return torch.softmax(scores.masked_fill(~seen.pairs[rows], -math.inf), dim=-1)


class LineMass(NamedTuple):
    """Attention mass of verticals and slashes, each (num_kv_blocks,)."""

    vertical: Tensor  # V, by key block
    slash: Tensor  # S, by block diagonal


def line_mass(attention: Tensor, rows: list[int], seen: Visibility) -> LineMass:
    return LineMass(vertical_mass(attention, seen), slash_mass(attention, rows, seen))


def vertical_mass(attention: Tensor, seen: Visibility) -> Tensor:
    """V[j]: the mean over the rows of p, summed over key block j."""
    return by_block(attention.mean(dim=0), seen.block_size)


def slash_mass(attention: Tensor, rows: list[int], seen: Visibility) -> Tensor:
    """S[c] = sum over o of a_s[o] * max(0, 1 - |o - cB| / B); 0 for diagonals without a visible block.

    A slash at offset cB + x meets block diagonal c in a fraction 1 - x/B of its rows, and c + 1 in x/B.
    """
    offset_mass = mass_by_offset(attention, rows, seen.offset)
    offsets = torch.arange(len(offset_mass), dtype=torch.float64)
    slash = torch.zeros(seen.num_kv_blocks, dtype=torch.float64)
    for c in seen.diagonals:
        tent = (1 - (offsets - c * seen.block_size).abs() / seen.block_size).clamp(min=0)
        slash[c] = (offset_mass * tent).sum()
    return slash


def mass_by_offset(attention: Tensor, rows: list[int], offset: int) -> Tensor:
    """a_s[o]: the mean over the rows i of p[i, position(i) - o], (kv_len,)."""
    total = torch.zeros(attention.shape[1], dtype=torch.float64)
    for row_attention, row in zip(attention, rows, strict=True):
        position = offset + row
        total[: position + 1] += row_attention[: position + 1].flip(0)
    return total / len(rows)


def by_block(values: Tensor, block_size: int) -> Tensor:
    """Sums of values per token or offset over blocks; the last block may be short."""
    return torch.stack([block.sum() for block in values.split(block_size)])


class KeyMeans(NamedTuple):
    """Mean of each key block's valid keys and the log of their number; zeros for an empty block."""

    means: Tensor  # (num_kv_blocks, head_dim)
    log_counts: Tensor  # (num_kv_blocks,)


def block_means(key: Tensor, seen: Visibility) -> KeyMeans:
    """The paper's avgpool of the keys."""
    means = torch.zeros(seen.num_kv_blocks, key.shape[1], dtype=torch.float64)
    log_counts = torch.zeros(seen.num_kv_blocks, dtype=torch.float64)
    for j in range(seen.num_kv_blocks):
        block = slice(j * seen.block_size, (j + 1) * seen.block_size)
        keys = key[block][seen.valid_keys[block]]
        if len(keys):
            means[j] = keys.mean(dim=0)
            log_counts[j] = math.log(len(keys))
    return KeyMeans(means, log_counts)


def pooled_attention(head: AttentionHead, rows: list[int], keys: KeyMeans, blocks: list[int]) -> Tensor:
    """Softmax over the given key blocks of the mean query's scores, weighed by keys per block, (num_kv_blocks,)."""
    query_mean = head.query[rows].mean(dim=0)
    scores = head.scores(query_mean[None], keys.means)[0] + keys.log_counts
    attention = torch.zeros(len(scores), dtype=torch.float64)
    attention[blocks] = torch.softmax(scores[blocks], dim=0)
    return attention


def estimated_attention(head: AttentionHead, rows: list[int], keys: KeyMeans, seen: Visibility) -> Tensor:
    """Pooled attention of the representative rows to the key blocks they see (a-bar)."""
    seen_keys = seen.pairs[rows].any(dim=0)
    blocks = [j for j, block in enumerate(seen_keys.split(seen.block_size)) if block.any()]
    return pooled_attention(head, rows, keys, blocks)


def jensen_shannon_distance(estimated: Tensor, true: Tensor) -> float:
    """Square root of the Jensen-Shannon divergence, natural logarithms, 0 log 0 = 0 (D_JS)."""
    divergence = 0.0
    for a, b in zip(estimated.tolist(), true.tolist(), strict=True):
        for mass in (a, b):
            if mass > 0:
                divergence += mass / 2 * math.log(2 * mass / (a + b))
            elif math.isnan(mass):
                divergence = math.nan
    return divergence if math.isnan(divergence) else math.sqrt(max(0.0, divergence))


class Budget(NamedTuple):
    """A share `gamma` of the sum, at most `cap` candidates, at least `floor`; the floor comes last."""

    gamma: float
    floor: int = 0
    cap: int | None = None


def heaviest_first(values: dict[Candidate, float]) -> list[Candidate]:
    """Candidates by falling value; equal values by rising index."""
    return sorted(values, key=lambda index: (-values[index], index))


def top_p(values: dict[Candidate, float], budget: Budget) -> list[Candidate]:
    """The fewest candidates, heaviest first, that sum to >= gamma of all, within floor and cap; gamma 1 keeps all."""
    order = heaviest_first(values)
    running = list(accumulate((values[index] for index in order), initial=0.0))
    count = len(order)
    if budget.gamma < 1:
        for length in range(1, len(order) + 1):
            if running[length] >= budget.gamma * running[-1]:
                count = length
                break
    if budget.cap is not None:
        count = min(count, budget.cap)
    return order[: max(count, budget.floor)]


def line_candidates(mass: LineMass, seen: Visibility) -> tuple[dict[int, float], dict[int, float]]:
    """V of the key blocks and S of the block diagonals that hold a visible block."""
    vertical, slash = mass.vertical.tolist(), mass.slash.tolist()
    return {j: vertical[j] for j in seen.key_blocks}, {c: slash[c] for c in seen.diagonals}


def blocks_on_lines(key_blocks: list[int], diagonals: list[int], seen: Visibility) -> set[Block]:
    """Every visible block on a selected line."""
    return {(r, j) for r, j in seen.visible_blocks if j in key_blocks or any(c in diagonals for c in seen.diagonals_of(r, j))}


def pooled_map(head: AttentionHead, keys: KeyMeans, seen: Visibility) -> Tensor:
    """A: pooled attention of every query block, (num_q_blocks, num_kv_blocks)."""
    pooled = torch.zeros(seen.num_q_blocks, seen.num_kv_blocks, dtype=torch.float64)
    for r in range(seen.num_q_blocks):
        if seen.rows_of(r):
            pooled[r] = pooled_attention(head, seen.rows_of(r), keys, seen.blocks_of(r))
    return pooled


def map_candidates(pooled: Tensor, seen: Visibility, query_aware: str) -> list[dict[Block, float]]:
    """A of the visible blocks, in groups that share gamma: one ("flatten") or one per query block ("per_query")."""
    values = pooled.tolist()
    rows = [{(r, j): values[r][j] for j in seen.blocks_of(r)} for r in range(seen.num_q_blocks)]
    return rows if query_aware == "per_query" else [{block: value for row in rows for block, value in row.items()}]


def top_p_rows(groups: list[dict[Block, float]], gamma: float, num_q_blocks: int) -> list[dict[Block, float]]:
    """The top-p blocks of each group of the pooled map, by query block."""
    rows: list[dict[Block, float]] = [{} for _ in range(num_q_blocks)]
    for candidates in groups:
        for block in top_p(candidates, Budget(gamma)):
            rows[block[0]][block] = candidates[block]
    return rows


def blocks_kept_always(seen: Visibility) -> set[Block]:
    """Each query block's first visible key block and its visible diagonal blocks."""
    blocks = set()
    for r in range(seen.num_q_blocks):
        visible = seen.blocks_of(r)
        blocks |= {(r, j) for j in visible if j == visible[0] or j in seen.position_blocks[r]}
    return blocks
