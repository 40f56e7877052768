"""Times of dense and sparse attention on this machine, for ``flexmask gain``."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexmask import plain
from flexmask.attend import RunOptions
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.base.selection import Selected
from flexmask.dense_policy import has_causal_kernel
from flexmask.flex.backend import chosen_backend
from flexmask.flex.block_mask import block_mask
from flexmask.flex.dense import dense_attention
from flexmask.flex.head_groups import head_groups
from flexmask.flex.heads import attend_heads
from flexmask.flex.run import run_flex_attention
from flexmask.flex.visible import sdpa
from flexmask.run_method import from_map
from flexmask.select import select_blocks
from flexmask.selector import Selector

# most timed runs after a warm-up, and seconds after which none follows
RUNS, _ENOUGH = 3, 5.0
# timed runs of each call, in turns: one slow moment of the machine then meets all of them
ROUNDS = 3
# expected seconds of a dense call, above which fewer heads are timed
_LONGEST = 5.0
_SDPA = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention 2": SDPBackend.FLASH_ATTENTION,
    "memory-efficient SDPA": SDPBackend.EFFICIENT_ATTENTION,
}
# of the product that gives the speed of the other layers
_MATMUL_ROWS = 4096


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None


class Times(NamedTuple):
    """Seconds of one attention call, of all heads, by round.

    Attributes
    ----------
    dense
        By the fastest dense kernel.
    kernel
        The name of that kernel.
    selection
        Of the method's masks.
    sparse
        Density, and attention over random blocks.
    share
        Share of the heads that was timed.
    """

    dense: list[float]
    kernel: str
    selection: list[float]
    sparse: tuple[tuple[float, list[float]], ...]
    share: float


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def select_all(inputs: AttentionInputs, selector: Selector, run: RunOptions) -> None:
    """Make the masks of all heads as attention does."""
    for group in head_groups(inputs.query, inputs.key, run.max_mask_bytes // selector.head_bytes, selector.method.shared):
        part = inputs.of_heads(group)
        block_mask(part, select_blocks(selector, part, group.query))


def median_seconds(call: Callable[[], Any], device: torch.device, runs: int = RUNS, warm_up: bool = True) -> float:
    """Median seconds of up to `runs` synchronised calls, after a warm-up."""
    taken: list[float] = []
    if warm_up:
        call()
    while not taken or (len(taken) < runs and sum(taken) < _ENOUGH):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def seconds_in_turns(calls: Sequence[Callable[[], Any]], device: torch.device, warm_up: bool = True) -> list[list[float]]:
    """For each call its seconds in `ROUNDS` rounds; every round runs each call once."""
    for call in calls if warm_up else ():
        call()
    rounds = [[median_seconds(call, device, 1, False) for call in calls] for _ in range(ROUNDS)]
    return [list(taken) for taken in zip(*rounds, strict=True)]


@torch.no_grad()
def matmul_speed(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a product of (rows, width) by (width, 4 width)."""
    rows = min(rows, _MATMUL_ROWS)
    left, right = (torch.randn(shape, device=device, dtype=dtype) for shape in ((rows, width), (width, 4 * width)))
    return 8 * rows * width * width / median_seconds(lambda: left @ right, device)


@torch.no_grad()
def model_times(
    plan: Iterable[Any],
    tokens: int,
    densities: Sequence[float],
    selector: Selector,
    run: RunOptions,
    speed: float,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Seconds of all attention layers of a `layer_plan` on random tensors, by round: dense, and sparse at each density.

    Layers that stay dense count in both, scaled by the pairs that their window shows.
    """
    times: dict[Shape, Times] = {}
    dense, selection = np.zeros(ROUNDS), np.zeros(ROUNDS)
    sparse, shares = np.zeros((len(densities), ROUNDS)), [0.0] * len(densities)
    number = 0
    for layer in plan:
        if layer.plan not in ("sparse", "dense"):
            continue
        is_sparse = layer.plan == "sparse"
        shape = Shape(layer.heads, layer.kv_heads, layer.head_dim, layer.window if is_sparse else None)
        if shape not in times or (is_sparse and not times[shape].sparse):
            times[shape] = random_times(shape, tokens, densities if is_sparse else (), selector, run, speed, device, dtype)
        found, window = times[shape], tokens if layer.window is None else min(layer.window, tokens)
        share = 1.0 if is_sparse else window * (2 * tokens - window) / tokens**2
        seconds = share * np.array(found.dense)
        dense += seconds
        number += is_sparse
        selection += found.selection if is_sparse else 0.0
        for at in range(len(densities)):
            sparse[at] += found.sparse[at][1] if is_sparse else seconds
            shares[at] += found.sparse[at][0] if is_sparse else 0.0
    return {
        "dense": {"kernel": ", ".join(sorted({each.kernel for each in times.values()})), "attention_seconds": dense.tolist()},
        "sparse": [
            {"density": share / number, "selection_seconds": selection.tolist(), "attention_seconds": each.tolist()}
            for share, each in zip(shares, sparse, strict=True)
        ],
        "timed_share_of_heads": min(each.share for each in times.values()),
    }


@torch.no_grad()
def random_times(
    shape: Shape,
    tokens: int,
    densities: Sequence[float],
    selector: Selector,
    run: RunOptions,
    speed: float,
    device: torch.device,
    dtype: torch.dtype,
) -> Times:
    """Times on random tensors: dense attention, selection, and attention over random blocks at each density.

    Times as many heads as take no longer than `_LONGEST` at `speed` FLOPs per second.
    """
    needed = 2 * tokens * tokens * shape.head_dim * shape.heads / speed
    keys = max(1, min(shape.kv_heads, int(shape.kv_heads * _LONGEST / needed)))
    share = keys / shape.kv_heads
    heads = keys * (shape.heads // shape.kv_heads)
    generator = torch.Generator(device=device).manual_seed(0)
    query, key, value = (
        torch.randn(1, number, tokens, shape.head_dim, generator=generator, device=device, dtype=dtype)
        for number in (heads, keys, keys)
    )
    inputs = attention_inputs(query, key, value, window=shape.window).prepared()
    kernel = fastest_dense(inputs)
    selector = Selector(selector.method, selector.block_size, one_for_all(selector.options)).for_inputs(inputs)
    sparse = [_over_random_blocks(inputs, selector, run, density) for density in densities]
    calls: list[Callable[[], Any]] = [dense_call(inputs, kernel), partial(select_all, inputs, selector, run)]
    calls += [each.call for each in sparse]
    found = seconds_in_turns(calls if densities else calls[:1], device)
    dense, *others = [[each / share for each in taken] for taken in found]
    if not densities:
        return Times(dense, kernel, [0.0] * ROUNDS, (), share)
    selection, *kept = others
    by_density = ((way.density, [way.groups * each for each in taken]) for way, taken in zip(sparse, kept, strict=True))
    return Times(dense, kernel, selection, tuple(by_density), share)


def one_for_all(options: dict[str, Any]) -> dict[str, Any]:
    """Options with the mean in place of numbers by head: random heads do not differ."""

    def of(value: Any) -> Any:
        plain_numbers = isinstance(value, tuple) and all(isinstance(each, (int, float)) for each in value)
        return sum(value) / len(value) if plain_numbers and value else value

    return {name: of(value) for name, value in options.items()}


def fastest_dense(inputs: AttentionInputs) -> str:
    """Name of the fastest dense kernel that serves the inputs."""
    device, found = inputs.query.device, dict[str, float]()
    calls = dict(_dense_calls(inputs))
    if len(calls) == 1:
        return next(iter(calls))
    for name, call in calls.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # reasons for refusing a call
                found[name] = median_seconds(call, device)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
    return min(found, key=lambda each: found[each])


def dense_call(inputs: AttentionInputs, kernel: str) -> Callable[[], Any]:
    """The call of a dense kernel, by its name."""
    return dict(_dense_calls(inputs))[kernel]


def _dense_calls(inputs: AttentionInputs) -> Iterator[tuple[str, Callable[[], Any]]]:
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    if query.device.type == "cpu":
        yield "SDPA", partial(dense_attention, inputs)
        return

    def by_sdpa(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(query, key, value, inputs.scale, is_causal=True)

    if has_causal_kernel(inputs):
        for name, of_sdpa in _SDPA.items():
            yield name, partial(by_sdpa, of_sdpa)
    backend = chosen_backend("auto", inputs, 128)
    everything = from_map(cut_into_blocks(inputs, 128, plain, False), None).lists
    mask = block_mask(inputs, Selected(everything, None, {}, 128))
    yield f"FlexAttention {backend.name}", partial(run_flex_attention, inputs, mask, backend.name, False, backend.lse_factor)


class _RandomBlocks(NamedTuple):
    density: float
    call: Callable[[], Any]  # attention of the first group of heads
    groups: float  # all heads over those of that group


def _over_random_blocks(inputs: AttentionInputs, selector: Selector, run: RunOptions, density: float) -> _RandomBlocks:
    """Attention over random blocks with the diagonal."""
    size, device = selector.block_size, inputs.query.device
    backend, plan = chosen_backend(run.backend, inputs, size), run.policy.plan(inputs, selector)
    how = (backend.name, False, backend.lse_factor)
    generator = torch.Generator(device=device).manual_seed(1)
    part = inputs.of_heads(next(iter(head_groups(inputs.query, inputs.key, run.max_mask_bytes // selector.head_bytes))))
    blocks = cut_into_blocks(part, size, plain, False)
    shape = (*part.query.shape[:2], *blocks.visible.shape[2:])
    diagonal = float(blocks.own.sum() / blocks.visible.sum())
    # the diagonal is always kept
    share = max(0.0, (density - diagonal) / max(1 - diagonal, 1e-9))
    keep = torch.rand(shape, generator=generator, device=device) < share
    lists = from_map(blocks, keep).lists
    kept = int((lists.kv_num_blocks + lists.full_kv_num_blocks).sum())
    visible = int(blocks.visible.sum()) * shape[1]
    dense, selected = [False] * part.key.shape[1], Selected(lists, None, {}, size)
    call = partial(attend_heads, part, selected, dense, plan.most_kept, *how)
    return _RandomBlocks(kept / max(visible, 1), call, inputs.query.shape[1] / part.query.shape[1])
