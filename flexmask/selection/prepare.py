"""The part of a selection that is the same in every layer: options on the device, and the geometry of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexmask import plain
from flexmask._torch import HAS_TRITON, is_traced, keep_static, on_device
from flexmask.base.blocks import block_problem
from flexmask.base.inputs import PositionedInputs, without_autocast
from flexmask.base.scores import widest_float
from flexmask.base.visibility import BlockVisibility
from flexmask.compilation import runs_uncompiled
from flexmask.method import FittedMethod, Method

if HAS_TRITON:
    from flexmask import kernels
    from flexmask.kernels.replay import LaunchReplay
if TYPE_CHECKING:
    from flexmask.kernels.visibility import KernelGeometry

# float32 values that a method materializes for one slice of rows, 512 MiB; its temporaries take two or three times that
MAX_FLOATS_PER_SLICE = 2**27


class PreparedSelection(NamedTuple):
    """The part of a selection that is the same in every layer."""

    method: FittedMethod
    method_for_steps: Method  # the method with options as its steps take them (`with_device_numbers`)
    by_kernels: bool
    rows_per_slice: int | None = None  # None: `select` runs on all rows at once
    # the geometry for kernels, and for plain steps; None: computed with the selection
    kernel_geometry: KernelGeometry | None = None
    geometry: BlockVisibility | None = None
    replay: LaunchReplay | None = None


def prepare_selection(
    method: FittedMethod, inputs: PositionedInputs, reuse_from: PreparedSelection | None = None, max_bytes: int | None = None
) -> PreparedSelection:
    """Prepare a selection; `reuse_from` is the result for other heads of the same batch rows, whose geometry is reused."""
    query, size, by_kernels = inputs.query, method.block_size, method.runs_kernels(inputs.query)
    with torch.no_grad(), without_autocast(query.device):
        if is_traced() and by_kernels:
            # the operator puts options on the device itself (`run_operator`)
            return PreparedSelection(method, method, True)
        # a launch takes numbers as they are
        for_steps = with_device_numbers(method, query, keep_numbers=by_kernels)
        if by_kernels:
            kernel_geometry = None if reuse_from is None else reuse_from.kernel_geometry
            if kernel_geometry is None:
                with on_device(query.device):
                    kernel_geometry = kernels.kernel_geometry(inputs, size)
            return PreparedSelection(method, for_steps, True, kernel_geometry=kernel_geometry)
        floats_per_row = method.floats_per_row(inputs.key.shape[2])
        if floats_per_row:
            # 8 bytes per value: the float32 and as much of its temporaries, whose rest exceeds `max_bytes`
            at_once = MAX_FLOATS_PER_SLICE if max_bytes is None else min(MAX_FLOATS_PER_SLICE, max_bytes // 8)
            rows = max(1, at_once // (query.shape[0] * query.shape[1] * floats_per_row * size)) * size
            if rows < query.shape[2]:
                return PreparedSelection(method, for_steps, False, rows)
        geometry = None if reuse_from is None else reuse_from.geometry
        # compiled steps compute the geometry in one graph with the rest
        if geometry is None and runs_uncompiled(query) and not is_traced():
            geometry = block_problem(inputs, size, plain).geometry
        return PreparedSelection(method, for_steps, False, geometry=geometry)


def with_replay(prepared: PreparedSelection) -> PreparedSelection:
    """Have the launches of one selection captured and replayed in later ones, if its kernels only launch."""
    only_launches = prepared.by_kernels and prepared.method_for_steps.only_launches
    return prepared._replace(replay=LaunchReplay()) if only_launches else prepared


def with_device_numbers(method: FittedMethod, query: Tensor, keep_numbers: bool) -> Method:
    """The method with its numbers as tensors in `widest_float`, so that another value is not another compilation.

    Floats become 0-d, except 0; options per head (num_heads,), pairs (.., 2). With `keep_numbers` floats stay numbers.
    """
    options, tensors = method.options, {}
    floats = [] if keep_numbers else [name for name in method.float_options if options[name] is not None and options[name] != 0]
    for name in (*floats, *method.pair_options, *method.per_head_options):
        value = options[name]
        if keep_numbers and isinstance(value, float):
            continue
        if not isinstance(value, Tensor):
            value = _on_device(query.device, value, (query.shape[1],) if name in method.per_head_options else ())
        if query.is_cuda and not keep_numbers and not is_traced():
            keep_static(value)
        tensors[name] = value
    return method.with_options(**tensors)


def _on_device(device: torch.device, value: Any, shape: tuple[int, ...] = ()) -> Tensor:
    """A number, filled into `shape`, or a tuple of numbers; the host does not wait."""
    dtype = widest_float(device)
    if not isinstance(value, tuple):
        return torch.full(shape, value, dtype=dtype, device=device)
    if device.type == "cuda" and not is_traced() and not torch.cuda.is_current_stream_capturing():
        return torch.tensor(value, dtype=dtype).to(device, non_blocking=True)
    # a captured copy would read the host's memory again
    return torch.stack([_on_device(device, part) for part in value])
