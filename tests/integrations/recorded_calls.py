"""Recorded calls of a run, without a model."""

import math
from dataclasses import replace

import torch

from flexmask.integrations.record import PrefillRun
from flexmask.integrations.record.calls import CallSize
from flexmask.settings import PrefillSettings
from flexmask.stats import dense_stats as dense_stats_of

HEADS = 4


def stats_of(seed, batch=1, hybrid=False):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS)
    density, coverage, rows = torch.rand((3, *shape), generator=generator)
    counts = torch.randint(100, (2, *shape), generator=generator)
    query_aware, is_dense = torch.rand((2, *shape), generator=generator) < 0.4
    distance = torch.full(shape, math.nan) if hybrid else torch.rand(shape, generator=generator)
    rows = rows if hybrid else torch.full(shape, math.nan)
    own = {"is_query_aware": query_aware, "js_distance": distance, "density": density, "coverage": coverage, "row_coverage": rows}
    own["least_row_coverage"] = rows / 2
    own |= {"num_vertical_blocks": counts[0], "num_slash_blocks": counts[1], "is_dense": is_dense}
    return replace(dense_stats(batch), **own, dense=False)


def dense_stats(batch=1):
    return dense_stats_of(torch.zeros(batch, HEADS, 1, 1))


def recorded(calls=6, max_calls=None, **options):
    """Layer 0 sparse; layer 1 dense in every third call; layer 2 dense."""
    run = PrefillRun(PrefillSettings(method="flexprefill", gamma=0.9, tau=0.2), max_calls=max_calls, **options)
    for call in range(calls):
        batch, q_len = 1 + call % 2, 100 + 10 * call
        size = CallSize(batch, q_len, q_len + 64 * (call % 2))
        run.record(0, stats_of(call, batch), None, None, 10 + call, size)
        dense = call % 3 == 0
        run.record(
            1, dense_stats(batch) if dense else stats_of(50 + call, batch), None, "short" if dense else None, 10 + call, size
        )
        run.record(2, dense_stats(batch), None, "in dense_layers", 10 + call, size)
    return run


def without_nan(rows):
    return [{name: "NaN" if value != value else value for name, value in row.items()} for row in rows]
