"""From query and key to the kept blocks of every head, and to their BlockMask.

Options that are numbers become tensors on the device: another value is not another compilation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import is_traced, keep_static
from flexmask.base.floats import widest_float
from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import Selected
from flexmask.flex.block_mask import block_mask
from flexmask.run_method import run_method
from flexmask.selector import Selector


def mask_of(selector: Selector, inputs: AttentionInputs, statistics: tuple[str, ...] = ()) -> tuple[BlockMask, Selected]:
    """The mask of inputs `with_offset`, its block choice in the mask_mod too, and its selection."""
    selected = select_blocks(selector, inputs, with_map=True, statistics=statistics)
    return block_mask(inputs, selected), selected


def select_blocks(
    selector: Selector,
    inputs: AttentionInputs,
    heads: slice | None = None,
    with_map: bool = False,
    statistics: tuple[str, ...] = (),
) -> Selected:
    """Choose the blocks of every head, outside of autograd. Autocast must be off.

    `selector` is from `Selector.for_inputs` of the whole call, `heads` are those of the call that `inputs` hold (default: all),
    `with_offset`.
    """
    with torch.no_grad():
        numbers = numbers_of(selector, inputs.query, heads)
        return run_method(selector, inputs, numbers, with_map, statistics)


def numbers_of(selector: Selector, query: Tensor, heads: slice | None) -> dict[str, Tensor]:
    """The options that are numbers, in `widest_float`: floats except 0 are 0-d, shares (num_heads,), pairs (.., 2).

    Those by head are for `heads` of the call.
    """
    device, method, options = query.device, selector.method, selector.options
    if heads is not None:
        options = {**options, **{name: _of_heads(options[name], heads) for name in (*method.shares, *method.pairs)}}
    tensors = {name: options[name] for name in method.shares if isinstance(options[name], Tensor)}
    values: dict[str, Any] = {name: options[name] for name in method.floats if options[name] is not None and options[name] != 0}
    for name in method.shares:
        if name not in tensors:
            values[name] = options[name]
    # torch 2.5 cannot trace |=
    values = {**values, **{name: options[name] for name in method.pairs}}
    heads_here = query.shape[1]
    written = {name: _written(device, value, (heads_here,) if name in method.shares else ()) for name, value in values.items()}
    tensors = {**tensors, **written}
    if not selector.runs_kernels(query):
        _keep_static(device, tensors.values())
    return tensors


def _of_heads(value: Any, heads: slice) -> Any:
    return value[heads] if isinstance(value, (tuple, Tensor)) and len(value) > 1 else value


def _written(device: torch.device, value: Any, shape: tuple[int, ...] = ()) -> Tensor:
    """A number, filled into `shape`, or a tuple of numbers; the host does not wait."""
    dtype = widest_float(device)
    if not isinstance(value, tuple):
        return torch.full(shape, value, dtype=dtype, device=device)
    if device.type == "cuda" and not is_traced() and not torch.cuda.is_current_stream_capturing():
        return torch.tensor(value, dtype=dtype).to(device, non_blocking=True)
    # a captured copy would read the host's memory again
    return torch.stack([_written(device, each) for each in value])


def _keep_static(device: torch.device, tensors: Iterable[Tensor]) -> None:
    if device.type == "cuda" and not is_traced():
        for tensor in tensors:
            keep_static(tensor)
