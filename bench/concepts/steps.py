"""Steps of the selection on two heads of the retriever, checked against the public mask functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.prompts.captured import retriever_prompt
from flexmask import flexprefill_mask, hybrid_mask, plain
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks.hybrid import LINES, NEAREST, thresholds
from flexmask.plain.pattern import estimated_attention
from flexmask.plain.query_aware import pooled_map, top_p_blocks
from flexmask.plain.vertical_slash import extended_lines
from flexmask.plot import block_kinds

TOKENS = 1536
BLOCK_SIZE = 64
GAMMA, TAU = 0.9, 0.1
FLOOR = 2  # blocks
ROW_STRIDE = 8
MIN_COVERAGE = 0.5
LAYERS = (0, 1)
HEADS_A_LAYER = 8
SEED = 0


class Head(NamedTuple):
    """Steps of one head; maps are (num_q_blocks, num_kv_blocks)."""

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
    keep: Tensor  # bool: the blocks of method "flexprefill"
    evidence: Tensor  # float32: hybrid's R, attention of each query block's rows to block means, root mean square
    threshold: float  # that R has to reach in the last query block
    kept_rows: Tensor  # bool: where it reaches hybrid's threshold
    hybrid_lines: Tensor  # bool: lines of the last rows that hybrid keeps, extended
    hybrid_keep: Tensor  # bool: the blocks of method "hybrid"


def heads() -> tuple[Head, Head]:
    """A vertical-slash head (layer 1) and a query-aware one (layer 0); RuntimeError if the steps and the masks disagree."""
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
    return float(keep.sum() / torch.ones_like(keep).tril().sum())


def held(head: Head, keep: Tensor) -> float:
    """Share of the head's true attention in the kept blocks, mean over rows."""
    inside = keep.repeat_interleave(BLOCK_SIZE, 0).repeat_interleave(BLOCK_SIZE, 1)
    return float((head.attention * inside).sum(-1).mean())


def facts() -> dict[str, str]:
    """The figures that docs/concepts.md must name, formatted."""
    slash, aware = heads()
    counts = {
        "key blocks kept": int(slash.kept_vertical.sum()),
        "diagonals kept": int(slash.kept_slash.sum()),
        "blocks kept": int(slash.keep.sum()),
        "query-aware blocks kept": int(aware.kept_pooled.sum()),
        "causal blocks": int(torch.ones_like(slash.keep).tril().sum()),
    }
    scores = {
        "vertical-slash distance": slash.distance,
        "query-aware distance": aware.distance,
        "hybrid threshold": slash.threshold,
    }
    shares = {
        "density": density(slash.keep),
        "held": held(slash, slash.keep),
        "query-aware density": density(aware.keep),
        "query-aware held": held(aware, aware.keep),
        "hybrid density": density(slash.hybrid_keep),
        "hybrid held": held(slash, slash.hybrid_keep),
        "hybrid own rows": density(slash.kept_rows),
    }
    forms = ((counts, "d"), (scores, ".3f"), (shares, ".1%"))
    return {name: f"{value:{form}}" for found, form in forms for name, value in found.items()}


def _steps(query: Tensor, key: Tensor) -> dict[str, Tensor]:
    """All heads, by the names of `Head`'s fields."""
    inputs = attention_inputs(query, key)
    gamma = torch.full((query.shape[1],), GAMMA, dtype=torch.float64)
    problem = cut_into_blocks(inputs, BLOCK_SIZE, plain)
    tokens, seen, visible, counts = problem.tokens, problem.seen, problem.visible, problem.key_counts()
    last, key_means = plain.representative_mass(problem, "last"), problem.key_means()

    estimated = estimated_attention(inputs, last.rows, key_means, counts, tokens, BLOCK_SIZE)
    kinds = plain.pattern_and_lines(problem, last, last, key_means, (gamma, TAU), (FLOOR, None))
    pooled = pooled_map(inputs, key_means, counts, tokens, seen, BLOCK_SIZE)
    blocks = plain.query_aware_blocks(problem, key_means, kinds.is_query_aware, gamma, "flatten", None)
    keep = plain.kept_blocks(problem, kinds.lines, blocks)[1]

    least = thresholds(problem, gamma)
    hybrid_lines = plain.last_rows_lines(problem, last, least.lines, NEAREST * FLOOR)
    evidence = plain.row_evidence(problem, ROW_STRIDE)
    rows = plain.row_blocks(problem, evidence, least.rows, LINES, torch.tensor(MIN_COVERAGE, dtype=torch.float64))
    hybrid_keep = plain.kept_blocks(problem, hybrid_lines, rows, last, (FLOOR, NEAREST * FLOOR))[1]

    options: dict[str, Any] = {"gamma": GAMMA, "block_size": BLOCK_SIZE, "min_budget": FLOOR * BLOCK_SIZE}
    for ours, mask in (
        (keep, flexprefill_mask(query, key, tau=TAU, **options)),
        (hybrid_keep, hybrid_mask(query, key, row_stride=ROW_STRIDE, min_coverage=MIN_COVERAGE, **options)),
    ):
        for head in range(query.shape[1]):
            if not torch.equal(ours[0, head], block_kinds(mask, head) >= 2):
                raise RuntimeError(f"head {head}: the steps keep other blocks than {mask.mask_mod.__name__}")

    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * inputs.scale
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return {
        "attention": scores.masked_fill(~causal, float("-inf")).softmax(-1),
        "last_rows": last.attention,
        "vertical": last.mass.vertical,
        "slash": last.mass.slash,
        "estimated": estimated,
        "distance": kinds.distance,
        "is_query_aware": kinds.is_query_aware,
        "kept_vertical": kinds.lines.vertical,
        "kept_slash": kinds.lines.slash,
        "lines": extended_lines(kinds.lines.vertical, kinds.lines.slash, seen) & visible,
        "pooled": pooled,
        "kept_pooled": top_p_blocks(pooled, visible, gamma, "flatten", None),
        "keep": keep,
        "evidence": evidence.root_mean_square,
        "threshold": least.rows[..., -1].expand(1, query.shape[1]),
        "kept_rows": rows.chosen & visible,
        "hybrid_lines": extended_lines(hybrid_lines.vertical, hybrid_lines.slash, seen) & visible,
        "hybrid_keep": hybrid_keep,
    }


def _head(found: dict[str, Tensor], layer: int, head: int) -> Head:
    place = LAYERS.index(layer) * HEADS_A_LAYER + head
    own: dict[str, Any] = {name: value[0, place] for name, value in found.items()}
    numbers: dict[str, Any] = {each: float(own.pop(each)) for each in ("distance", "threshold")}
    return Head(name=f"layer {layer}, head {head}", is_query_aware=bool(own.pop("is_query_aware")), **numbers, **own)
