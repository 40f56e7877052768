"""Soft-capping in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def soft_capped(score, softcap):
    """``softcap * tanh(score / softcap)``; near 0 by its series, which cancels nothing."""
    x = tl.abs(score / softcap)
    grown = tl.exp2(-2 * 1.4426950408889634 * x)
    capped = softcap * (1 - grown) / (1 + grown)
    return tl.where(x < 0.03, score * (1 - x * x / 3), tl.where(score < 0, -capped, capped))
