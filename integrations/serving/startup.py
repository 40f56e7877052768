"""Work before the first request: logs the roles of layers, makes the calls that compile everything, and the largest call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from flexmask.integrations.serving.chunk import attend_chunk
from flexmask.integrations.serving.counters import SAMPLED_STATISTICS
from flexmask.integrations.serving.layers import Role, SparseLayer, Stock
from flexmask.integrations.serving.options import ServingOptions
from flexmask.warming import LENGTHS, MANY_BLOCKS

Size = tuple[int, int]  # of a call: rows, and tokens so far
_SHORT = 128  # rows; FlexAttention compiles shorter calls separately
_STEPS = 64  # lengths at which the number of heads per mask is computed


def roles_line(roles: Collection[Role], options: ServingOptions, kernel: str, min_rows: int | None = None) -> str:
    """The line that is logged at start-up: what runs sparse, how, and which layers stay stock, and why."""
    if not roles:
        return f"flexmask: no attention layers found in this model; {kernel} runs it. Settings: {options.source}."
    sparse = [role for role in roles if isinstance(role, SparseLayer)]
    line = f"flexmask: {len(sparse)} of {len(roles)} attention layers prefill sparse"
    if sparse:
        rows = min_rows or options.policy.min_rows
        line += f" ({_method_summary(sparse)}) from {options.policy.dense_below} tokens on, in chunks of at least {rows} rows"
        line += f", on FlexAttention's backend {options.settings.backend!r}"
    line += f"; {kernel} runs the other rows and layers. Settings: {options.source}."
    reasons = Counter(role.reason for role in roles if isinstance(role, Stock))
    if reasons:
        counted = (f"{count} layer{'s' if count > 1 else ''} ({reason})" for reason, count in reasons.items())
        line += f" Layers left to it: {'; '.join(counted)}."
    return line


def _method_summary(roles: Iterable[SparseLayer]) -> str:
    """Method and options, as "hybrid, gamma 0.9"; without options at their default, unless they may differ by head."""
    methods = [role.method for role in roles]
    first = methods[0]
    parts = [first.name]
    for name, default in first.defaults.items():
        values = [method.options[name] for method in methods]
        if name in first.per_head_options:
            shares = [float(share) for value in values for share in (value if isinstance(value, tuple) else (value,))]
            low, high = min(shares), max(shares)
            parts.append(f"{name} {low:g}" if low == high else f"{name} {low:g} to {high:g} by layer or head")
        elif any(value != default for value in values):
            parts.append(f"{name} {values[0]}" if all(value == values[0] for value in values) else f"{name} by layer")
    return ", ".join(parts)


def warm_up(roles: Iterable[SparseLayer], largest: Size, device: torch.device, dtype: torch.dtype, count_density: bool) -> float:
    """Compile for each variant of the roles; return the seconds that it took."""
    start = time.perf_counter()
    for role in _variants(roles):
        for size in warm_sizes(role, largest, device):
            for statistics in ((), SAMPLED_STATISTICS) if count_density else ((),):
                call_of_size(role, size, device, dtype, statistics)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def reserve(roles: Iterable[SparseLayer], size: Size, device: torch.device, dtype: torch.dtype, count_density: bool) -> None:
    """Make the largest call on CUDA, with memory allocated as for the gathered keys and values."""
    for role in _variants(roles):
        # an upper bound: the gathered rows are freed before attention runs. The call's random query takes as much memory as the
        # contiguous, dequantized copy of a chunk's queries
        rows = torch.empty(size[1], role.num_kv_heads, 2 * role.head_dim, dtype=dtype, device=device)
        call_of_size(role, size, device, dtype, SAMPLED_STATISTICS if count_density else ())
        del rows
    torch.cuda.synchronize(device)


def peak_memory_of(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call adds at its peak to the memory of a CUDA device."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def call_of_size(
    role: SparseLayer, size: Size, device: torch.device, dtype: torch.dtype, statistics: tuple[str, ...] = ()
) -> Tensor:
    """Attention of random rows, whose kernels it compiles."""
    rows, seq_len = size
    random = torch.Generator(device).manual_seed(0)
    query = torch.randn(rows, role.num_heads, role.head_dim, dtype=dtype, device=device, generator=random)
    key, value = (
        torch.randn(role.num_kv_heads, seq_len, width, dtype=dtype, device=device, generator=random)
        for width in (role.head_dim, role.v_head_dim)
    )
    sinks = torch.zeros(role.num_heads, dtype=dtype, device=device) if role.has_sinks else None
    return attend_chunk(role, query, key, value, sinks, statistics=statistics).out


def _variants(roles: Iterable[SparseLayer]) -> list[SparseLayer]:
    """One role of each variant."""
    return list({role.variant: role for role in roles}.values())


def warm_sizes(role: SparseLayer, largest: Size, device: torch.device) -> list[Size]:
    """Sizes of prompts and chunks that compile all kernels of a role; long ones do not exceed `largest`."""
    block = role.method.block_size
    sizes = [(rows, length) for length in LENGTHS for rows in (length, length // 2)]
    # chunks of one block, whose size torch compiles as a constant, and chunks below `_SHORT`
    short = [block] if block >= _SHORT else [block, _SHORT - 1]
    sizes += [(rows, LENGTHS[0]) for rows in short] + [
        (rows, rows) for rows in short if rows >= role.call_options.policy.dense_below
    ]
    if device.type == "cuda":
        longest = [min(blocks * block, largest[1]) for blocks in MANY_BLOCKS]
        sizes += [(min(rows, largest[0]), length) for length in longest for rows in (length, length // 2)]
        sizes += grouped_sizes(role, largest, device)
    return list(dict.fromkeys(sizes))


def grouped_sizes(role: SparseLayer, largest: Size, device: torch.device) -> list[Size]:
    """Two sizes of long calls for each number of heads per mask: torch compiles the first for its size, the second for all."""
    block, (max_rows, longest) = role.method.block_size, largest
    by_kind: dict[tuple[int, bool], list[Size]] = {}
    step = max(longest // _STEPS, 2 * block)
    for seq_len in range(longest, 4 * block, -step):
        whole = [(seq_len, seq_len)] if seq_len <= max_rows else []
        for size in (*whole, (min(max_rows, seq_len - 2 * block), seq_len)):
            heads = heads_per_mask(role, size, device)
            if heads < role.num_heads:
                by_kind.setdefault((heads, size[0] == seq_len), []).append(size)
    calls = []
    for sizes in by_kind.values():
        # from the middle of the range, so that the second call, shorter by different numbers of blocks, is of the same kind
        rows, seq_len = sizes[(len(sizes) - 1) // 2]
        shorter = rows - block if rows == seq_len else max(rows - 2 * block, rows // 2)
        calls += [(rows, seq_len), (shorter, seq_len - block)]
    return calls


def heads_per_mask(role: SparseLayer, size: Size, device: torch.device) -> int:
    """Query heads whose masks exist at one time in a call, by `max_mask_bytes`."""
    inputs = role.inputs_of(*size, device)
    group = role.method.for_inputs(inputs).groups(inputs, role.call_options.max_mask_bytes)[0]
    return group.query_heads.stop - group.query_heads.start
