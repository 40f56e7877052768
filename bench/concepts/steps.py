"""The numbers behind the pictures of docs/concepts.md: every step of the selection, on two heads of the trained retriever.

The steps are those of `flexmask.plain`, in its order; what they keep is checked against `flexprefill_mask`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.prompts.captured import retriever_prompt
from flexmask import FlexPrefillConfig, flexprefill_mask
from flexmask.base.candidate_lines import candidate_lines
from flexmask.base.hybrid_rule import ROWS
from flexmask.base.inputs import attention_inputs
from flexmask.base.representative_rows import representative_rows
from flexmask.base.visibility import block_visibility, token_validity, valid_keys
from flexmask.plain.hybrid import last_rows_lines, nearest_of_last_rows, reaches
from flexmask.plain.pattern import estimated_attention, jensen_shannon_distance
from flexmask.plain.pooling import block_means
from flexmask.plain.query_aware import pooled_map, top_p_blocks
from flexmask.plain.representative import representative_attention
from flexmask.plain.row_evidence import row_evidence
from flexmask.plain.vertical_slash import blocks_kept_always, extended_lines, kept_lines, line_mass, row_mass
from flexmask.plot import block_kinds

TOKENS = 1536
GAMMA = 0.9
CONFIG = FlexPrefillConfig(gamma=GAMMA, block_size=64, min_budget=128)
HYBRID = FlexPrefillConfig(gamma=GAMMA, block_size=64, min_budget=128, selection="hybrid")
LAYERS = (0, 1)
HEADS_A_LAYER = 8
SEED = 0


class Head(NamedTuple):
    """One head's way through the selection; maps are (num_q_blocks, num_kv_blocks)."""

    name: str
    attention: Tensor  # (q_len, kv_len) float32: the true attention, which the selection never computes
    last_rows: Tensor  # (block_size, kv_len) float32: its last block of rows, which it does
    vertical: Tensor  # (num_kv_blocks,) float32: V, mass by key block
    slash: Tensor  # (num_kv_blocks,) float32: S, mass by block diagonal
    estimated: Tensor  # (num_kv_blocks,) float32: attention estimated from block means
    distance: float  # Jensen-Shannon distance of `estimated` to `vertical`
    is_query_aware: bool
    kept_vertical: Tensor  # (num_kv_blocks,) bool
    kept_slash: Tensor  # (num_kv_blocks,) bool
    lines: Tensor  # bool: both, extended over the map
    pooled: Tensor  # float32: attention of block means to block means
    kept_pooled: Tensor  # bool: its top-p, used by query-aware heads
    keep: Tensor  # bool: the blocks of selection="coverage"
    evidence: Tensor  # float32: hybrid's R, attention of each query block's rows to block means, root mean square
    kept_rows: Tensor  # bool: where it reaches hybrid's threshold
    hybrid_lines: Tensor  # bool: lines of the last rows that hybrid keeps, extended
    hybrid_keep: Tensor  # bool: the blocks of selection="hybrid"


def heads() -> tuple[Head, Head]:
    """A vertical-slash head (layer 1) and a query-aware one (layer 0).

    Raises
    ------
    RuntimeError
        If the steps keep other blocks than the public function does.
    """
    query, key, _ = retriever_prompt(
        TOKENS,
        layers=LAYERS,
        num_heads=HEADS_A_LAYER * len(LAYERS),
        num_kv_heads=2 * len(LAYERS),
        seed=SEED,
        device="cpu",
        dtype=torch.float32,
    )
    found = _steps(query, key)
    vertical_slash, query_aware = _head(found, 1, 6), _head(found, 0, 6)
    if vertical_slash.is_query_aware or not query_aware.is_query_aware:
        raise RuntimeError("the two heads must show both patterns; choose others")
    return vertical_slash, query_aware


def density(keep: Tensor) -> float:
    """Kept share of the causal blocks."""
    return float(keep.sum() / torch.ones_like(keep).tril().sum())


def held(head: Head, keep: Tensor) -> float:
    """Share of the head's true attention inside the kept blocks, mean over all rows."""
    size = CONFIG.block_size
    inside = keep.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return float((head.attention * inside).sum(-1).mean())


def facts() -> dict[str, str]:
    """The figures that docs/concepts.md names, formatted as they stand there."""
    slash, aware = heads()
    counts = {
        "key blocks kept": int(slash.kept_vertical.sum()),
        "diagonals kept": int(slash.kept_slash.sum()),
        "blocks kept": int(slash.keep.sum()),
        "query-aware blocks kept": int(aware.kept_pooled.sum()),
        "causal blocks": int(torch.ones_like(slash.keep).tril().sum()),
    }
    shares = {
        "vertical-slash distance": slash.distance,
        "query-aware distance": aware.distance,
        "density": density(slash.keep),
        "held": held(slash, slash.keep),
        "query-aware density": density(aware.keep),
        "query-aware held": held(aware, aware.keep),
        "hybrid density": density(slash.hybrid_keep),
        "hybrid held": held(slash, slash.hybrid_keep),
        "hybrid own rows": density(slash.kept_rows),
    }
    return {**{name: str(count) for name, count in counts.items()}, **{name: f"{share:.3f}" for name, share in shares.items()}}


def _steps(query: Tensor, key: Tensor) -> dict[str, Tensor]:
    """All heads at once, by the names of `Head`'s fields."""
    inputs, size = attention_inputs(query, key), CONFIG.block_size
    gamma = torch.full((query.shape[1],), GAMMA, dtype=torch.float64)
    tau = torch.tensor(CONFIG.tau, dtype=torch.float64)
    tokens = token_validity(TOKENS, TOKENS, None, None, key)
    seen, candidates = block_visibility(tokens, size, None), candidate_lines(tokens, size, None)
    always, visible = blocks_kept_always(seen)[:, None], seen.visible[:, None]

    rows = representative_rows("last", tokens, size)
    last_rows = representative_attention(inputs, rows, tokens)
    mass = line_mass(row_mass(last_rows, rows, size), rows, size)
    key_means, key_counts = block_means(key, None, size), valid_keys(tokens, size)
    estimated = estimated_attention(inputs, rows, key_means, key_counts, tokens, size)
    distance = jensen_shannon_distance(estimated, mass.vertical)
    is_query_aware = distance < tau

    kept_vertical, kept_slash, _ = kept_lines(mass, candidates, is_query_aware, gamma, CONFIG)
    lines = extended_lines(kept_vertical, kept_slash, seen) & visible
    pooled = pooled_map(inputs, key_means, key_counts, tokens, seen, size)
    kept_pooled = top_p_blocks(pooled, visible, gamma, CONFIG)
    keep = (lines | (kept_pooled & is_query_aware[..., None, None]) | always) & visible

    evidence = row_evidence(inputs, key_means, key_counts, tokens, size, HYBRID.row_stride).root_mean_square
    hybrid_lines = extended_lines(*last_rows_lines(mass, rows, candidates, gamma, HYBRID), seen) & visible
    kept_rows = reaches(evidence, ROWS, gamma) & visible
    nearest = nearest_of_last_rows(rows, seen, HYBRID)[:, None]
    hybrid_keep = hybrid_lines | kept_rows | ((always | nearest) & visible)
    for name, ours, config in (("coverage", keep, CONFIG), ("hybrid", hybrid_keep, HYBRID)):
        mask: Any = flexprefill_mask(query, key, config=config)
        for head in range(query.shape[1]):
            if not torch.equal(ours[0, head], block_kinds(mask, head) >= 2):
                raise RuntimeError(f"head {head}: the steps keep other blocks than flexprefill_mask with selection={name!r}")

    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * inputs.scale
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return {
        "attention": scores.masked_fill(~causal, float("-inf")).softmax(-1),
        "last_rows": last_rows,
        "vertical": mass.vertical,
        "slash": mass.slash,
        "estimated": estimated,
        "distance": distance,
        "is_query_aware": is_query_aware,
        "kept_vertical": kept_vertical,
        "kept_slash": kept_slash,
        "lines": lines,
        "pooled": pooled,
        "kept_pooled": kept_pooled,
        "keep": keep,
        "evidence": evidence,
        "kept_rows": kept_rows,
        "hybrid_lines": hybrid_lines,
        "hybrid_keep": hybrid_keep,
    }


def _head(found: dict[str, Tensor], layer: int, head: int) -> Head:
    place = LAYERS.index(layer) * HEADS_A_LAYER + head
    own = {name: value[0, place] for name, value in found.items()}
    distance, is_query_aware = float(own.pop("distance")), bool(own.pop("is_query_aware"))
    return Head(name=f"layer {layer}, head {head}", distance=distance, is_query_aware=is_query_aware, **own)
