"""Times of dense and sparse attention on this machine, for ``flexmask gain``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexmask import plain
from flexmask.attend import attend_heads
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import SparseInputs, attention_inputs, head_groups
from flexmask.base.selection import Selection
from flexmask.dense_policy import has_causal_kernel
from flexmask.flex.backend import chosen_backend
from flexmask.flex.block_mask import block_mask
from flexmask.flex.dense import dense_attention, sdpa
from flexmask.flex.run import run_flex_attention
from flexmask.plans import plan_call
from flexmask.select import from_map, prepare_selection, select_blocks
from flexmask.selector import CallSelector
from flexmask.settings import PrefillSettings

if TYPE_CHECKING:
    from flexmask.integrations.huggingface.layer_plan import PlannedLayer

ROUNDS = 3  # timed runs of each call, in turns: one slow moment of the machine then meets all of them
# expected seconds of a dense call, above which fewer heads are timed
_LONGEST = 5.0
_SDPA = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention 2": SDPBackend.FLASH_ATTENTION}
_SDPA["memory-efficient SDPA"] = SDPBackend.EFFICIENT_ATTENTION
_MATMUL_ROWS = 4096  # of the product that gives the speed of the other layers


class Times:
    """Seconds of attention layers, summed by round: dense, and by density the selection and attention over its blocks."""

    def __init__(self, densities: int) -> None:
        self.dense, self.selection, self.attention = np.zeros(ROUNDS), np.zeros(ROUNDS), np.zeros((densities, ROUNDS))
        self.density = np.zeros(densities)
        self.kernels: set[str] = set()  # the fastest dense ones
        self.share = 1.0  # of the heads, that was timed

    def add(self, dense: np.ndarray, selection: np.ndarray, attention: np.ndarray) -> None:
        self.dense += dense
        self.selection += selection
        self.attention += attention

    def document(self, rest: float) -> dict[str, Any]:
        """Medians of the rounds, and the expected time to first token: attention, selection, and `rest` seconds of the model."""
        dense, selection, sparse = float(np.median(self.dense)), float(np.median(self.selection)), []
        for density, by_round in zip(self.density, self.attention, strict=True):
            attention, ratios = float(np.median(by_round)), (rest + self.dense) / (rest + self.selection + by_round)
            first = rest + selection + attention
            seconds = {"selection_seconds": selection, "attention_seconds": attention, "first_token_seconds": first}
            of_dense = {"attention_ratio": dense / (selection + attention), "first_token_ratio": (rest + dense) / first}
            # of one round
            extremes = {"first_token_ratios": [float(ratios.min()), float(ratios.max())]}
            sparse.append({"density": float(density), **seconds, **of_dense, **extremes})
        kernel = ", ".join(sorted(self.kernels))
        whole = {"kernel": kernel, "attention_seconds": dense, "first_token_seconds": rest + dense}
        return {"rest_seconds": rest, "dense": whole, "sparse": sparse}


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def seconds_in_turns(calls: Sequence[Callable[[], Any]], device: torch.device, warm_up: bool = True) -> list[np.ndarray]:
    """For each call its seconds in `ROUNDS` rounds; every round runs each call once."""
    for call in calls if warm_up else ():
        call()
    seconds = np.zeros((len(calls), ROUNDS))
    for at in range(ROUNDS):
        for number, call in enumerate(calls):
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            seconds[number, at] = time.perf_counter() - start
    return list(seconds)


@torch.no_grad()
def matmul_speed(rows: int, width: int, zero: Tensor) -> float:
    """FLOPs per second of a product of (rows, width) by (width, 4 width)."""
    rows = min(rows, _MATMUL_ROWS)
    left, right = (torch.randn(shape, device=zero.device, dtype=zero.dtype) for shape in ((rows, width), (width, 4 * width)))
    return float(8 * rows * width * width / np.median(seconds_in_turns([lambda: left @ right], zero.device)))


@torch.no_grad()
def model_times(
    plan: Sequence[PlannedLayer], tokens: int, densities: Sequence[float], settings: PrefillSettings, speed: float, zero: Tensor
) -> Times:
    """Times of a `layer_plan` on random tensors like `zero`, 0-d; dense layers count in both, by the pairs of their window."""
    by_shape: dict[tuple[int | None, ...], Times] = {}
    whole = Times(len(densities))
    # sparse layers first: their times serve dense ones of the same shape
    for layer in sorted(plan, key=lambda layer: layer.plan != "sparse"):
        if layer.plan not in ("sparse", "dense"):
            continue
        is_sparse = layer.plan == "sparse"
        shape = (layer.heads, layer.kv_heads, layer.head_dim, layer.window if is_sparse else None)
        if shape not in by_shape:
            by_shape[shape] = random_times(shape, tokens, densities if is_sparse else (), settings, speed, zero)
        times = by_shape[shape]
        if is_sparse:
            whole.add(times.dense, times.selection, times.attention)
            whole.density += times.density / sum(layer.plan == "sparse" for layer in plan)
        else:
            window = tokens if layer.window is None else min(layer.window, tokens)
            dense = times.dense * (window * (2 * tokens - window) / tokens**2)
            whole.add(dense, np.zeros(ROUNDS), dense)
        whole.kernels |= times.kernels
        whole.share = min(whole.share, times.share)
    return whole


@torch.no_grad()
def random_times(
    shape: tuple[Any, ...], tokens: int, densities: Sequence[float], settings: PrefillSettings, speed: float, zero: Tensor
) -> Times:
    """Times of one layer on random tensors of heads, key heads, head_dim and window; without `densities` only dense ones.

    Times as many heads as share a mask and take no longer than `_LONGEST` at `speed` FLOPs per second, scaled up to all.
    """
    heads, kv_heads, head_dim, window = shape
    call_options = settings.call_options
    whole = attention_inputs(*(zero.expand(1, n, tokens, head_dim) for n in (heads, kv_heads, kv_heads)), window=window)
    selector = settings.selector().for_inputs(whole)
    key_heads = int(_LONGEST * kv_heads * speed / (2 * tokens * tokens * head_dim * heads))
    at_once = min(call_options.max_mask_bytes // selector.head_bytes(whole), max(1, key_heads) * (heads // kv_heads))
    group = head_groups(whole.query, whole.key, max(at_once, heads // kv_heads))[0]
    generator = torch.Generator(zero.device).manual_seed(0)
    query, key, value = (
        torch.randn(1, part.stop - part.start, tokens, head_dim, generator=generator, device=zero.device, dtype=zero.dtype)
        for part in (group.query, group.key, group.key)
    )
    inputs = attention_inputs(query, key, value, window=window).prepared()
    times, kernel = Times(len(densities)), fastest_dense(inputs)
    times.kernels, times.share = {kernel}, query.shape[1] / heads
    calls: list[Callable[[], Any]] = [dense_calls(inputs)[kernel]]
    if densities:
        calls.append(partial(select_all, inputs, selector.of_heads(group.query), call_options.max_mask_bytes))
        backend = chosen_backend(call_options.backend, inputs, selector.block_size)
        plan = plan_call(whole, settings.selector(), call_options)
    for number, density in enumerate(densities):
        blocks, times.density[number] = _random_blocks(inputs, selector.block_size, density)
        calls.append(partial(attend_heads, inputs, blocks, (False,) * key.shape[1], plan.most_kept, backend))
    seconds = np.stack(seconds_in_turns(calls, zero.device)) / times.share
    times.add(seconds[0], seconds[1] if densities else np.zeros(ROUNDS), seconds[2:])
    return times


def _random_blocks(inputs: SparseInputs, block_size: int, density: float) -> tuple[Selection, float]:
    """Random blocks with the diagonal, and their density."""
    generator = torch.Generator(device=inputs.query.device).manual_seed(1)
    blocks = cut_into_blocks(inputs, block_size, plain)
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
    everything = from_map(cut_into_blocks(inputs, 128, plain), None).lists
    mask = block_mask(inputs, Selection(everything, None, {}, 128))
    flex = partial(run_flex_attention, inputs, mask, backend.name, False, backend.lse_factor)
    return {**calls, f"FlexAttention {backend.name}": flex}


def select_all(inputs: SparseInputs, selector: CallSelector, max_mask_bytes: int) -> None:
    """Make the masks of all heads as attention does."""
    for group in selector.groups(inputs, max_mask_bytes):
        part = inputs.of_heads(group)
        block_mask(part, select_blocks(prepare_selection(selector.of_heads(group.query), part), part))
