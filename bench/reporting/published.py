"""Figures of the published code, quoted from a run of its own, not measured by this benchmark."""

from __future__ import annotations

from bench.reporting.plots import Line
from bench.reporting.tables import markdown_table, ms, thousands

# The published code (github.com/bytedance/FlexPrefill), run by us on one H200 with torch 2.11, on inputs of that run. By tokens:
# milliseconds, and cuDNN dense attention in the same run.
PUBLISHED_DENSE_MS = {32768: 14.4, 131072: 251.0}
PUBLISHED_MS = {
    "mask": {32768: 9.0, 131072: 18.5},
    "whole call, gamma 0.9": {32768: 17.0, 131072: 119.0},
    "whole call, gamma 0.95": {32768: 20.8, 131072: 181.0},
    "block kernel, density .10": {32768: 3.59, 131072: 48.3},
    "block kernel, density .035": {32768: 1.66, 131072: 17.8},
}


def published_lines() -> dict[str, Line]:
    """Return the points to draw on pictures of the same device."""
    quoted = {"published call": "whole call, gamma 0.9", "published mask": "mask"}
    return {name: [(float(tokens), value) for tokens, value in PUBLISHED_MS[row].items()] for name, row in quoted.items()}


def published_section() -> list[str]:
    """Return the section's lines."""
    rows = []
    for name, by_tokens in PUBLISHED_MS.items():
        for tokens, value in by_tokens.items():
            dense = PUBLISHED_DENSE_MS[tokens]
            rows.append((name, thousands(tokens), ms(value), ms(dense), f"{dense / value:.2f}x", f"{value / dense:.1%}"))
    notes = (
        "github.com/bytedance/FlexPrefill, which we ran on one NVIDIA H200 with torch 2.11 (bf16, batch 1, 32 heads, 8 KV heads, "
        "head_dim 128). The figures come from that run, on its own inputs: compare them through their ratio to dense attention."
    )
    head = ("method", "tokens", "ms", "dense cuDNN of that run, ms", "dense / this", "this / dense")
    return ["## The published code, quoted", "", notes, *markdown_table(head, rows)]
