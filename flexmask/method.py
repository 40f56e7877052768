"""mask_method: from a function that keeps blocks to a mask generator with the core's checks, padding, chunks and lists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.inputs import attention_inputs
from flexmask.block_problem import BlockProblem as BlockProblem
from flexmask.gallery_method import Keep, MakePlan, Method


def mask_method(
    keep: Keep | None = None,
    *,
    check: Callable[..., None] | None = None,
    numbers: Callable[..., int] | None = None,
    by_rows: bool = False,
    plans: dict[str, MakePlan | None] | None = None,
    shared: bool = False,
) -> Callable[..., Any]:
    """Turn ``keep(problem, **options)`` into ``<name>(query, key, *, block_size, scale, softcap, window, ..., **options)``.

    On accelerators the method is compiled, once per set of options that are not floats; on CPUs it runs as it is.

    Parameters
    ----------
    keep
        From a `BlockProblem` to the kept blocks, bool, (batch or 1, num_heads or 1, num_q_blocks, num_kv_blocks), or None for
        every visible block. Blocks without a visible pair are dropped, and the block of a row's own position is added. Options
        annotated as float come as 0-d tensors (float64 where the device has it), so that another value is not another
        compilation; all others as they are, and count as compile-time constants.
    check, numbers, by_rows, plans, shared
        As in `Method`.

    Returns
    -------
    callable
        A generator of BlockMasks, with the `Method` as its attribute ``method``. It checks its arguments as
        `flexmask.flexprefill_mask` does.
    """
    if keep is None:
        return functools.partial(mask_method, check=check, numbers=numbers, by_rows=by_rows, plans=plans, shared=shared)
    own = list(inspect.signature(keep).parameters.values())[1:]
    floats = tuple(p.name for p in own if str(p.annotation).startswith("float"))
    method = Method(keep, {p.name: p.default for p in own}, floats, check, numbers, by_rows, plans or {}, shared)

    @functools.wraps(keep, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def generate(
        query: Tensor,
        key: Tensor,
        *,
        block_size: int = 128,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        attention_mask: Tensor | None = None,
        q_offset: int | Tensor | None = None,
        **options: Any,
    ) -> BlockMask:
        inputs = attention_inputs(
            query, key, scale=scale, softcap=softcap, window=window, attention_mask=attention_mask, q_offset=q_offset
        ).placed()
        checked = method.checked(query.shape[1], block_size, options)
        # inside a surrounding compilation a float may be symbolic, which no string can be made of
        told = {} if torch.compiler.is_compiling() else {"window": window, "block_size": block_size, **options}
        title = f"{method.name}({', '.join(f'{name}={value}' for name, value in told.items())})"
        return method.mask(inputs, block_size, checked, title=title)

    del generate.__wrapped__  # its signature is another
    shown = [p for p in inspect.signature(generate).parameters.values() if p.kind is not p.VAR_KEYWORD]
    signature = inspect.Signature([*shown, *(p.replace(kind=p.KEYWORD_ONLY) for p in own)], return_annotation="BlockMask")
    generate.__signature__ = signature  # type: ignore[attr-defined]  # which inspect and help() read
    generate.method = method  # type: ignore[attr-defined]  # a mark on a function
    return generate
