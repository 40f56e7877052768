"""Options of calls, whatever their method."""

from __future__ import annotations

from typing import NamedTuple

from flexmask.base.checks import check_int, check_word, plain_number
from flexmask.dense_policy import DENSE_BELOW, DensePolicy
from flexmask.flex.backend import BACKENDS

DEFAULT_MASK_BYTES = 2**30


class CallOptions(NamedTuple):
    """Checked options, from `checked_call_options`."""

    backend: str = "auto"
    policy: DensePolicy = DensePolicy()
    max_mask_bytes: int = DEFAULT_MASK_BYTES


def checked_call_options(backend: str, dense_below: int | None, max_mask_bytes: int) -> CallOptions:
    """Check the options and fill in their defaults."""
    check_word("backend", backend, BACKENDS)
    max_mask_bytes = plain_number(max_mask_bytes)
    check_int("max_mask_bytes", max_mask_bytes)
    if max_mask_bytes <= 0:
        raise ValueError(f"max_mask_bytes must be > 0 bytes; got {max_mask_bytes}")
    dense_below = DENSE_BELOW if dense_below is None else plain_number(dense_below)
    check_int("dense_below", dense_below)
    if dense_below < 0:
        raise ValueError(f"dense_below must be >= 0 tokens; got {dense_below}")
    return CallOptions(backend, DensePolicy(dense_below), max_mask_bytes)
