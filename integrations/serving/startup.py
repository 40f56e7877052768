"""Work before the first request: the log line, compilation, the largest call."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from flexmask.dense_policy import DensePolicy
from flexmask.integrations.serving.counters import IN_EVERY_STEP, IN_SOME_STEPS
from flexmask.integrations.serving.layers import SparseLayer, attend
from flexmask.integrations.serving.options import ServingOptions
from flexmask.integrations.serving.warm_sizes import warm_sizes

Name = TypeVar("Name")


def served_roles(
    roles: Mapping[Name, SparseLayer | str], policy: DensePolicy, largest: tuple[int, int]
) -> dict[Name, SparseLayer | str]:
    """The roles; all dense if even the largest call (rows, tokens) would run dense."""
    reason = policy.by_size(*largest)
    if reason is None:
        return dict(roles)
    return {name: f"the largest call: {reason}" if isinstance(role, SparseLayer) else role for name, role in roles.items()}


def roles_line(roles: Collection[SparseLayer | str], options: ServingOptions, kernel: str, least_rows: int | None = None) -> str:
    """The line at start-up."""
    if not roles:
        return f"flexmask runs dense: no attention layers found in this model; {kernel} serves it. Settings: {options.source}."
    sparse = [role for role in roles if isinstance(role, SparseLayer)]
    line = f"flexmask: {len(sparse)} of {len(roles)} attention layers prefill sparse"
    if sparse:
        rows = least_rows or options.policy.least_rows
        line += f" ({_method(sparse)}) from {options.policy.dense_below} tokens on, in chunks of at least {rows} rows"
        line += f", on FlexAttention's backend {options.settings.backend!r}"
    line += f"; {kernel} serves all else. Settings: {options.source}."
    reasons: dict[str, int] = {}
    for role in roles:
        if isinstance(role, str):
            reasons[role] = reasons.get(role, 0) + 1
    if reasons:
        line += f" Dense: {'; '.join(f'{number} layers ({reason})' for reason, number in reasons.items())}."
    return line


def _method(layers: Iterable[SparseLayer]) -> str:
    """As in "hybrid, gamma 0.9, min_budget 1024": options that may differ by head, and others unlike the defaults."""
    selectors = [layer.selector for layer in layers]
    method = selectors[0].method
    parts = [method.name]
    for name, default in method.defaults.items():
        found = [each.options[name] for each in selectors]
        if name in method.shares:
            values = [float(share) for value in found for share in (value if isinstance(value, tuple) else (value,))]
            low, high = min(values), max(values)
            parts.append(f"{name} {low:g}" if low == high else f"{name} {low:g} to {high:g} by layer or head")
        elif any(value != default for value in found):
            parts.append(f"{name} {found[0]}" if all(value == found[0] for value in found) else f"{name} by layer")
    return ", ".join(parts)


def warm_up(
    layers: Iterable[SparseLayer], largest: tuple[int, int], device: torch.device, dtype: torch.dtype, count_density: bool
) -> float:
    """Compile once per variant of the layers; returns seconds."""
    start = time.perf_counter()
    for layer in _variants(layers):
        for size in warm_sizes(layer, largest, device):
            for statistics in (IN_EVERY_STEP, IN_SOME_STEPS) if count_density else ((),):
                call_of_size(layer, size, device, dtype, statistics)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def reserve(
    layers: Iterable[SparseLayer], size: tuple[int, int], device: torch.device, dtype: torch.dtype, count_density: bool
) -> None:
    """Make the largest call while the gathered keys and values take memory, on CUDA."""
    for layer in _variants(layers):
        # an upper bound, since the gathered rows are freed before attention runs. The call's query stands for the one copy of a
        # chunk's queries, contiguous and no longer FP8
        rows = torch.empty(size[1], layer.num_kv_heads, 2 * layer.head_dim, dtype=dtype, device=device)
        call_of_size(layer, size, device, dtype, IN_SOME_STEPS if count_density else ())
        del rows
    torch.cuda.synchronize(device)


def bytes_of(call: Callable[[], object], device: torch.device) -> int:
    """Memory on a CUDA device that a call takes at its peak."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def call_of_size(
    layer: SparseLayer, size: tuple[int, int], device: torch.device, dtype: torch.dtype, statistics: tuple[str, ...] = ()
) -> Tensor:
    rows, tokens = size
    random = torch.Generator(device).manual_seed(0)
    query = torch.randn(rows, layer.num_heads, layer.head_dim, dtype=dtype, device=device, generator=random)
    key, value = (
        torch.randn(layer.num_kv_heads, tokens, width, dtype=dtype, device=device, generator=random)
        for width in (layer.head_dim, layer.v_head_dim)
    )
    sinks = torch.zeros(layer.num_heads, dtype=dtype, device=device) if layer.has_sinks else None
    return attend(layer, query, key, value, sinks, statistics)[0]


def _variants(layers: Iterable[SparseLayer]) -> list[SparseLayer]:
    return list({each.variant: each for each in layers}.values())
