"""A user's function of query and key: its blocks, checked and limited to what is visible, and what its mask_mod captures.

Python numbers in a mask_mod become constants of the compiled kernel, which takes few symbolic ones.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import KNOWS_LENGTHS, SLICED_MASK_MOD, is_traced
from flexmask.base.blocks import BlockProblem
from flexmask.base.checks import is_integer
from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import BlockLists, Choice, Selection, ascending_indices, kept_and_full
from flexmask.base.visibility import num_blocks
from flexmask.flex.block_mask import MaskMod

# keywords of every call of a user's function; scale and softcap are passed only if it names them
_KEYWORDS = ("block_size", "window", "attention_mask", "q_offset")


def users_choice(problem: BlockProblem, function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Choice:
    """Call `function`, check its mask, and drop what causality, window and padding hide."""
    inputs, block_size, visible = problem.inputs, problem.block_size, problem.visibility.visible
    parameters = inspect.signature(function).parameters
    given = {"scale": inputs.scale, "softcap": inputs.softcap}
    score_arguments = {keyword: value for keyword, value in given.items() if keyword in parameters}
    geometry = {"window": inputs.window, "attention_mask": inputs.attention_mask, "q_offset": inputs.offset}
    mask: Any = function(inputs.query, inputs.key, block_size=block_size, **score_arguments, **geometry, **options)
    _check(mask, f"method {name} must return", inputs, block_size)
    kept, full = kept_and_full(mask, visible.shape[-1])
    kept = (kept & visible[:, None]).expand(inputs.query.shape[0], -1, -1, -1)
    full = full & problem.visibility.full[:, None]
    lists = BlockLists(*ascending_indices(kept & ~full), *ascending_indices(kept & full))
    return Choice(lists, None, mask_mod=mask.mask_mod)


def check_takes_keywords(function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    """TypeError unless a user's function can be called as `users_choice` calls it."""
    signature: Any = "no signature"
    try:
        signature = inspect.signature(function)
        signature.bind(None, None, **dict.fromkeys((*_KEYWORDS, *options)))
    except (TypeError, ValueError) as error:  # some builtins have no signature
        raise TypeError(
            f"method {name} must be a function of query and key that takes the keywords {', '.join((*_KEYWORDS, *options))} "
            f"(or **keywords) and returns a BlockMask; got one with {signature}: {error}"
        ) from None


def _check(mask: Any, message_start: str, inputs: AttentionInputs, block_size: int) -> None:
    """Refuse what is no BlockMask of these inputs; messages begin with `message_start`."""
    if not isinstance(mask, BlockMask):
        raise TypeError(f"{message_start} a BlockMask; got {type(mask).__name__}")
    if mask.BLOCK_SIZE != (block_size, block_size):
        raise ValueError(f"{message_start} a mask in blocks of {block_size} tokens, as it is told to; got {mask.BLOCK_SIZE}")
    if SLICED_MASK_MOD is not None and mask.mask_mod is SLICED_MASK_MOD:
        raise ValueError(
            f"{message_start} a mask with its mask_mod, which slicing drops; set it again: part.mask_mod = whole.mask_mod"
        )
    if not callable(mask.mask_mod):
        raise TypeError(f"{message_start} a mask with a mask_mod that can be called; got {type(mask.mask_mod).__name__}")
    batch, num_heads, q_len, _ = inputs.query.shape
    lengths = (q_len, inputs.key.shape[2])
    if KNOWS_LENGTHS and tuple(mask.seq_lengths) != lengths:
        raise ValueError(f"{message_start} a mask of (q_len, kv_len) = {lengths}; got {tuple(mask.seq_lengths)}")
    for name in BlockLists._fields:
        tensor = getattr(mask, name)
        if tensor is None:
            continue
        if tensor.device != inputs.query.device:
            raise ValueError(f"{message_start} {name} on query's device {inputs.query.device}; got {tensor.device}")
        if not is_integer(tensor):
            raise TypeError(f"{message_start} {name} of integers; got {tensor.dtype}")
    counts, q_blocks = mask.kv_num_blocks, num_blocks(q_len, block_size)
    shape = tuple(counts.shape)
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] not in (1, num_heads) or shape[2] != q_blocks:
        expected = f"({batch} or 1, {num_heads} or 1, {q_blocks})"
        raise ValueError(f"{message_start} kv_num_blocks of {expected}, a count for each query block; got {shape}")
    if mask.full_kv_num_blocks is not None and tuple(mask.full_kv_num_blocks.shape) != shape:
        full_shape = tuple(mask.full_kv_num_blocks.shape)
        raise ValueError(f"{message_start} full_kv_num_blocks of kv_num_blocks' shape {shape}; got {full_shape}")
    for name, indices in (("kv_indices", mask.kv_indices), ("full_kv_indices", mask.full_kv_indices)):
        if indices is not None and tuple(indices.shape[:-1]) != shape:
            row_shape = ", ".join(map(str, shape))
            raise ValueError(f"{message_start} {name} of ({row_shape}, ..), as kv_num_blocks is; got {tuple(indices.shape)}")


def with_constant_numbers(selection: Selection, backend: str) -> tuple[Selection, contextlib.AbstractContextManager[Any]]:
    """`selection` with a user's mask_mod whose numbers are constants, and a context in which torch.compile takes floats so.

    The selection's title, hence the compiled kernel, names the numbers.
    """
    # a number that changes is symbolic: kernels for CPUs and FLASH take none, Triton's no floats (2.13)
    user_mask_mod = selection.mask_mod
    if user_mask_mod is None or is_traced():
        return selection, contextlib.nullcontext()
    takes_ints = backend == "triton"
    values = [value for value in captured_values(user_mask_mod) if not (takes_ints and type(value) is int)]
    mask_mod = user_mask_mod
    if not takes_ints:
        # torch.compile takes ints that it reaches through a default argument as constants
        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, user_mask_mod: MaskMod = user_mask_mod) -> Tensor:
            return user_mask_mod(b, h, q_idx, kv_idx)

    title = f"{selection.title}{values}" if values else selection.title
    # in torch 2.13 of this thread alone
    return selection.with_fields(mask_mod=mask_mod, title=title), torch._dynamo.config.patch(specialize_float=True)


def captured_values(function: Any) -> Iterator[Hashable]:
    """Numbers and strings in a function's closure, defaults and partials, also in containers and attributes; not its globals."""
    waiting: list[Any] = [function]
    visited: set[int] = set()
    names: set[str] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, (numbers.Number, str)):
            yield value
        elif id(value) not in visited:
            visited.add(id(value))
            waiting += reversed(_contents(value, names))


def _contents(value: Any, names: set[str]) -> list[Any]:
    """The parts of `value`; of objects the attributes in `names`, to which a function adds those that it reads."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        names.update(value.__code__.co_names)
        # a cell of a variable that has no value yet equals an empty one
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [*cells, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (type, types.ModuleType, Tensor)) or not hasattr(value, "__dict__"):
        return []
    call_contents = _contents(type(value).__call__, names) if callable(value) else []
    return [*call_contents, *(part for name, part in vars(value).items() if name in names)]
