"""Differences between the releases of transformers that the adapter serves, and the check of the installed one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function
from transformers.masking_utils import sliding_window_causal_mask_function as window_function

OLDEST, NEWEST = (4, 54), (5, 23)
# newer releases wrap the mask of packed sequences in it
remap_positions = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
# whether some models build their own 4-D masks, whatever the mask interface says
MODELS_MAKE_4D_MASKS = transformers.__version__.startswith("4.")


def check_release() -> None:
    """Refuse a transformers outside of the releases that were tested.

    Raises
    ------
    ImportError
        With the release that is installed and those that are served.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", transformers.__version__)[:2])
    if not OLDEST <= release <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise ImportError(f"flexprefill serves transformers {oldest} to {newest}; got {transformers.__version__}")


_is_autocast_enabled = torch.is_autocast_enabled


class _AutocastOnMeta(torch.autocast):
    """torch.autocast, and for the meta device that of the CPU."""

    def __init__(self, device_type: str, *arguments: Any, **keywords: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *arguments, **keywords)


def _is_autocast_enabled_on_meta(device_type: str | None = None) -> bool:
    return _is_autocast_enabled(*([] if device_type is None else ["cpu" if device_type == "meta" else device_type]))


@contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Let models run on the meta device whose rotary embeddings switch autocast off there, which torch refuses.

    Releases 4.54 to 5.0, and some after them, do that; 5.23 leaves it out.
    """
    # as attributes of torch, which is where models find them
    before = torch.autocast, torch.is_autocast_enabled
    torch.autocast, torch.is_autocast_enabled = _AutocastOnMeta, _is_autocast_enabled_on_meta  # type: ignore[misc]  # not meant to be assigned
    try:
        yield
    finally:
        torch.autocast, torch.is_autocast_enabled = before  # type: ignore[misc]  # not meant to be assigned


def rows_of_queries(arguments: dict[str, Any]) -> tuple[int, int | Tensor]:
    """Number of query rows that a mask function is called for, and the position of the first.

    From 5.4 on transformers says so (`q_length`, `q_offset`), before that it gives all positions (`cache_position`). A tensor may
    be the cache's own, which it moves on before attention runs: the copy stays.
    """
    positions = arguments.get("cache_position")
    length, offset = (
        (positions.shape[0], positions[0]) if positions is not None else (arguments["q_length"], arguments["q_offset"])
    )
    return length, offset.clone() if isinstance(offset, Tensor) else offset


def window_of(mask_function: Callable[..., Any], local_size: int | None) -> tuple[bool, int | None, Tensor | None]:
    """Recognise plain causality, with a sliding window or without, of a prompt or of packed ones.

    `mask_function` is compared by its code with what transformers makes for these cases. Newer releases count the positions of
    packed sequences from each one's start; since they only see their own sequence, whose positions are consecutive, that changes
    nothing.

    Returns
    -------
    tuple
        Whether it is that; its window; (batch or 1, q_len) integer ids that tell packed sequences apart. The ids are given for
        prompts without a cache and an attention_mask, before release 5 also for those that are not packed: then all are equal.
    """
    expected = causal_mask_function if local_size is None else window_function(local_size)
    if _same(mask_function, expected):
        return True, local_size, None
    tensors = _tensors(mask_function)
    for ids in tensors:
        own = packed_sequence_mask_function(ids)
        if _same(mask_function, and_masks(expected, own)):
            return True, local_size, ids
        if remap_positions is not None:
            forms = (and_masks(own, remap_positions(expected, positions)) for positions in tensors)
            if any(_same(mask_function, form) for form in forms):
                return True, local_size, ids
    return False, None, None


def _same(left: Any, right: Any) -> bool:
    """Compare two functions: the same code and, all the way down, the same captured values; tensors by identity."""
    if left is right:
        return True
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if callable(left) and callable(right):
        code = getattr(left, "__code__", None)
        return code is not None and code is getattr(right, "__code__", None) and _same(_captured(left), _captured(right))
    return isinstance(left, int) and isinstance(right, int) and left == right


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, tuple) else _captured(value) if callable(value) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _captured(function: Any) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
