"""Times of dense and sparse attention on this machine, for ``flexmask gain``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexmask import plain
from flexmask.attend import attend_heads
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.head_groups import head_groups
from flexmask.base.inputs import SparseInputs, attention_inputs
from flexmask.base.selection import Selection
from flexmask.dense_policy import has_causal_kernel
from flexmask.flex.backend import chosen_backend
from flexmask.flex.block_mask import block_mask
from flexmask.flex.dense import dense_attention, sdpa
from flexmask.flex.run import run_flex_attention
from flexmask.select import from_map, select_blocks
from flexmask.selector import CallSelector
from flexmask.settings import PrefillSettings

if TYPE_CHECKING:
    from flexmask.integrations.huggingface.layer_plan import PlannedLayer

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


class Times(NamedTuple):
    """Seconds of one layer's attention, of all heads; arrays hold the rounds."""

    kernel: str  # the fastest dense one
    dense: np.ndarray
    selection: np.ndarray
    sparse: list[tuple[float, np.ndarray]]  # density, and attention over random blocks
    share: float  # of the heads, that was timed


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def seconds_in_turns(calls: Sequence[Callable[[], Any]], device: torch.device, warm_up: bool = True) -> list[np.ndarray]:
    """For each call its seconds in `ROUNDS` rounds; every round runs each call once."""
    for call in calls if warm_up else ():
        call()
    taken = np.zeros((len(calls), ROUNDS))
    for at in range(ROUNDS):
        for number, call in enumerate(calls):
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            taken[number, at] = time.perf_counter() - start
    return list(taken)


@torch.no_grad()
def matmul_speed(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a product of (rows, width) by (width, 4 width)."""
    rows = min(rows, _MATMUL_ROWS)
    left, right = (torch.randn(shape, device=device, dtype=dtype) for shape in ((rows, width), (width, 4 * width)))
    return float(8 * rows * width * width / np.median(seconds_in_turns([lambda: left @ right], device)))


@torch.no_grad()
def model_times(
    plan: Sequence[PlannedLayer],
    tokens: int,
    densities: Sequence[float],
    settings: PrefillSettings,
    speed: float,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Seconds of all attention layers of a `layer_plan` on random tensors, by round: dense, and sparse at each density.

    Layers that stay dense count in both, scaled by the pairs that their window shows.
    """
    times: dict[tuple[int | None, ...], Times] = {}
    dense, selection, sparse = np.zeros(ROUNDS), np.zeros(ROUNDS), np.zeros((len(densities), ROUNDS))
    kept = np.zeros(len(densities))
    # sparse layers first: their times serve dense ones of the same shape
    for layer in sorted(plan, key=lambda layer: layer.plan != "sparse"):
        if layer.plan not in ("sparse", "dense"):
            continue
        is_sparse = layer.plan == "sparse"
        shape = (layer.heads, layer.kv_heads, layer.head_dim, layer.window if is_sparse else None)
        if shape not in times:
            times[shape] = random_times(shape, tokens, densities if is_sparse else (), settings, speed, device, dtype)
        timed_layer, window = times[shape], tokens if layer.window is None else min(layer.window, tokens)
        seconds = timed_layer.dense * (1.0 if is_sparse else window * (2 * tokens - window) / tokens**2)
        dense += seconds
        if is_sparse:
            selection += timed_layer.selection
            sparse += [attention for _, attention in timed_layer.sparse]
            kept += [share for share, _ in timed_layer.sparse]
        else:
            sparse += seconds
    kept /= max(1, sum(layer.plan == "sparse" for layer in plan))
    return {
        "dense": {"kernel": ", ".join(sorted({timed.kernel for timed in times.values()})), "attention_seconds": dense},
        "sparse": [
            {"density": float(share), "selection_seconds": selection, "attention_seconds": attention}
            for share, attention in zip(kept, sparse, strict=True)
        ],
        "timed_share_of_heads": min(timed.share for timed in times.values()),
    }


@torch.no_grad()
def random_times(
    shape: tuple[Any, ...],
    tokens: int,
    densities: Sequence[float],
    settings: PrefillSettings,
    speed: float,
    device: torch.device,
    dtype: torch.dtype,
) -> Times:
    """Times on random tensors of heads, key heads, head_dim and window: dense, selection, and random blocks at each density.

    Times as many heads as share a mask, and take no longer than `_LONGEST` at `speed` FLOPs per second.
    """
    heads, kv_heads, head_dim, window = shape
    call_options = settings.call_options
    nothing = torch.zeros((), device=device, dtype=dtype)
    whole = attention_inputs(*(nothing.expand(1, n, tokens, head_dim) for n in (heads, kv_heads, kv_heads)), window=window)
    selector = settings.selector().for_inputs(whole)
    key_heads = int(_LONGEST * kv_heads * speed / (2 * tokens * tokens * head_dim * heads))
    at_once = min(call_options.max_mask_bytes // selector.head_bytes, max(1, key_heads) * (heads // kv_heads))
    group = head_groups(whole.query, whole.key, max(at_once, heads // kv_heads))[0]
    generator = torch.Generator(device=device).manual_seed(0)
    query, key, value = (
        torch.randn(1, part.stop - part.start, tokens, head_dim, generator=generator, device=device, dtype=dtype)
        for part in (group.query, group.key, group.key)
    )
    inputs = attention_inputs(query, key, value, window=window).prepared()
    kernel, share = fastest_dense(inputs), query.shape[1] / heads
    calls: list[Callable[[], Any]] = [dense_calls(inputs)[kernel]]
    sparse = []
    if densities:
        calls.append(lambda: block_mask(inputs, select_blocks(selector, inputs, group.query)))
        backend = chosen_backend(call_options.backend, inputs, selector.block_size)
        plan = call_options.policy.plan(whole, selector)
        for density in densities:
            selected, kept = _random_blocks(inputs, selector.block_size, density)
            calls.append(partial(attend_heads, inputs, selected, [False] * key.shape[1], plan.most_kept, backend))
            sparse.append(kept)
    dense, *others = (seconds / share for seconds in seconds_in_turns(calls, device))
    selection, *attention = others or [np.zeros(ROUNDS)]
    return Times(kernel, dense, selection, list(zip(sparse, attention, strict=True)), share)


def _random_blocks(inputs: SparseInputs, block_size: int, density: float) -> tuple[Selection, float]:
    """Random blocks with the diagonal, and their density."""
    generator = torch.Generator(device=inputs.query.device).manual_seed(1)
    blocks = cut_into_blocks(inputs, block_size, plain, False)
    visible, diagonal = int(blocks.visible.sum()), float(blocks.own.sum() / blocks.visible.sum())
    # the diagonal is always kept
    share = max(0.0, (density - diagonal) / max(1 - diagonal, 1e-9))
    shape = (*inputs.query.shape[:2], *blocks.visible.shape[2:])
    lists = from_map(blocks, torch.rand(shape, generator=generator, device=inputs.query.device) < share).lists
    kept = int((lists.kv_num_blocks + lists.full_kv_num_blocks).sum())
    return Selection(lists, None, {}, block_size), kept / max(visible * shape[1], 1)


def fastest_dense(inputs: SparseInputs) -> str:
    """Name of the fastest dense kernel that serves the inputs."""
    calls, seconds = dense_calls(inputs), dict[str, float]()
    if len(calls) == 1:
        return next(iter(calls))
    for name, call in calls.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # reasons for refusing a call
                seconds[name] = float(np.median(seconds_in_turns([call], inputs.query.device)))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
    return min(seconds, key=lambda name: seconds[name])


def dense_calls(inputs: SparseInputs) -> dict[str, Callable[[], Any]]:
    """Dense attention by each kernel, by its name."""
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    if query.device.type == "cpu":
        return {"SDPA": partial(dense_attention, inputs)}

    def by_sdpa(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(query, key, value, inputs.scale, is_causal=True)

    calls = {name: partial(by_sdpa, backend) for name, backend in _SDPA.items()} if has_causal_kernel(inputs) else {}
    backend = chosen_backend("auto", inputs, 128)
    everything = from_map(cut_into_blocks(inputs, 128, plain, False), None).lists
    mask = block_mask(inputs, Selection(everything, None, {}, 128))
    flex = partial(run_flex_attention, inputs, mask, backend.name, False, backend.lse_factor)
    return {**calls, f"FlexAttention {backend.name}": flex}


def select_all(inputs: SparseInputs, selector: CallSelector, max_mask_bytes: int) -> None:
    """Make the masks of all heads as attention does."""
    for group in selector.groups(inputs, max_mask_bytes):
        part = inputs.of_heads(group)
        block_mask(part, select_blocks(selector, part, group.query))
