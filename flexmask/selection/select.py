"""From query and key to the kept blocks."""

from __future__ import annotations

import torch

from flexmask._torch import is_traced
from flexmask.base.inputs import PositionedInputs, without_autocast
from flexmask.base.selection import Selection
from flexmask.selection.operator import run_operator
from flexmask.selection.prepare import PreparedSelection
from flexmask.selection.run import run_in_slices, run_kernels, run_plain


def select_blocks(
    prepared: PreparedSelection, inputs: PositionedInputs, with_map: bool = False, statistics: tuple[str, ...] = ()
) -> Selection:
    """Choose the blocks of every head, outside of autograd and autocast."""
    method, query = prepared.method, inputs.query
    with torch.no_grad(), without_autocast(query.device):
        if prepared.by_kernels:
            result = (run_operator if is_traced() else run_kernels)(prepared, inputs, with_map, statistics)
        else:
            if inputs.out is not None:
                # compiled steps would be compiled again for memory that they do not read
                inputs = inputs.with_fields(out=None)
            result = (run_plain if prepared.rows_per_slice is None else run_in_slices)(prepared, inputs, statistics)
        if not with_map and result.mask_mod is None:
            # without a map and a title all methods share one compiled kernel
            return result if result.keep is None else result.with_fields(keep=None)
        title = method.name if result.mask_mod is not None else method.title
        return result.with_fields(keep=result.keep if with_map else None, title=title)
