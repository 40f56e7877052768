"""BlockMasks of blocks that other code selected, after checks of these blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask import plain
from flexmask._torch import is_fake
from flexmask.base.blocks import block_problem
from flexmask.base.checks import check_offset, check_plain, is_integer, plain_number
from flexmask.base.option_checks import check_block_size, check_count
from flexmask.base.selection import Selection, block_lists
from flexmask.base.visibility import num_blocks
from flexmask.flex.block_mask import block_mask, inputs_of_mask


def from_block_map(
    block_map: Tensor,
    q_len: int,
    kv_len: int,
    *,
    block_size: int = 128,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: int | None = None,
) -> BlockMask:
    """The BlockMask of a map that other code selected, under causality, a window and padding. Reads values on the host.

    Parameters
    ----------
    block_map
        (batch, num_heads or 1, num_q_blocks, num_kv_blocks) bool; or integer, nonzero is kept.
    q_len, kv_len, block_size
        Rows, keys, and tokens per block.
    window
        Keys that a row sees, its own counted; default: all.
    attention_mask
        (batch, kv_len) bool; or integer, nonzero is a token; on any device; default: all are.
    q_offset
        Position of row 0; default: the last row is at the last key.

    Returns
    -------
    BlockMask
        On the map's device, with flexmask's mask_mod, which allows pairs of kept blocks only.

    Raises
    ------
    TypeError, ValueError
        For tensors of other types, without values (meta, fake), and shapes that do not fit; for a kept block that no row sees;
        for a query block that keeps blocks but not its diagonal. One that keeps none is allowed: another kernel may compute it.

    Examples
    --------
    >>> import torch
    >>> kept = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]])[None, None]
    >>> from_block_map(kept, 96, 96, block_size=32).sparsity()
    44.44444444444444
    """
    # a BlockMask takes Python's ints only, not NumPy's
    q_len, kv_len, block_size, window, q_offset = map(plain_number, (q_len, kv_len, block_size, window, q_offset))
    _check_lengths(q_len, kv_len, block_size, window, q_offset)
    _check_values("block_map", block_map, "bool or integers")
    map_shape = (num_blocks(q_len, block_size), num_blocks(kv_len, block_size))
    if block_map.dim() != 4 or tuple(block_map.shape[2:]) != map_shape or 0 in block_map.shape:
        raise ValueError(
            f"block_map must be (batch, num_heads, {map_shape[0]}, {map_shape[1]}) for ({q_len}, {kv_len}) tokens in blocks of "
            f"{block_size}; got {tuple(block_map.shape)}"
        )
    batch = block_map.shape[0]
    if attention_mask is not None:
        _check_values("attention_mask", attention_mask, "bool or integers")
        if tuple(attention_mask.shape) != (batch, kv_len):
            raise ValueError(f"attention_mask must be ({batch}, {kv_len}); got {tuple(attention_mask.shape)}")
        attention_mask = attention_mask.to(block_map.device) != 0
    offset = None if q_offset is None else torch.full((batch,), q_offset, dtype=torch.int32, device=block_map.device)
    inputs = inputs_of_mask(block_map, (q_len, kv_len), window, attention_mask, offset)
    problem, keep = block_problem(inputs, block_size, plain), block_map != 0
    is_unseen = keep & ~problem.visible
    _refuse_first(is_unseen, "keeps key block {3}, which no row of query block {2} sees (head {1}, prompt {0})")
    lacks_diagonal = problem.diagonal_blocks & problem.visible & ~keep & keep.any(-1, keepdim=True)
    _refuse_first(lacks_diagonal, "lacks the diagonal, key block {3}, for query block {2} of head {1}, prompt {0}")
    lists = block_lists(keep, problem.visibility.full.expand(batch, -1, -1))
    return block_mask(inputs, Selection(lists, keep, {}, block_size, title="imported"))


def from_index_list(
    indices: Tensor,
    counts: Tensor,
    q_len: int,
    kv_len: int,
    *,
    block_size: int = 128,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: int | None = None,
) -> BlockMask:
    """The BlockMask of lists that other code selected, in any order; see `from_block_map`, which checks what they keep.

    Parameters
    ----------
    indices
        (batch, num_heads or 1, num_q_blocks, entries) of integers, key blocks; entries past the count are ignored.
    counts
        (batch, num_heads or 1, num_q_blocks) of integers, on indices' device.
    q_len, kv_len, block_size, window, attention_mask, q_offset
        As for `from_block_map`.

    Returns
    -------
    BlockMask
        As from `from_block_map`.

    Raises
    ------
    TypeError, ValueError
        As `from_block_map`; for counts and key blocks outside of their range, and for a block listed twice.

    Examples
    --------
    >>> import torch
    >>> indices, counts = torch.tensor([[[[0, -1], [1, 0], [2, 1]]]]), torch.tensor([[[1, 2, 2]]])
    >>> from_index_list(indices, counts, 96, 96, block_size=32).sparsity()
    44.44444444444444
    """
    _check_lengths(q_len, kv_len, block_size, window, q_offset)
    for name, tensor in (("indices", indices), ("counts", counts)):
        _check_values(name, tensor, "integers")
    if counts.device != indices.device:
        raise ValueError(f"counts must be on indices' device {indices.device}; got {counts.device}")
    if indices.dim() != 4 or counts.shape != indices.shape[:-1]:
        raise ValueError(
            "indices must be (batch, num_heads, num_q_blocks, entries) and counts their first three sizes; got "
            f"{tuple(indices.shape)} and {tuple(counts.shape)}"
        )
    # a narrow dtype may not hold the numbers that counts and indices are compared with
    indices, counts = indices.long(), counts.long()
    num_kv_blocks, entries = num_blocks(kv_len, block_size), indices.shape[-1]
    is_wrong_count = (counts < 0) | (counts > entries)
    _refuse_first(is_wrong_count, f"has a count outside 0 to {entries} for query block {{2}} of head {{1}}, prompt {{0}}")
    is_counted = torch.arange(entries, device=indices.device) < counts.unsqueeze(-1)
    is_outside = is_counted & ((indices < 0) | (indices >= num_kv_blocks))
    place = "as entry {3} for query block {2} of head {1}, prompt {0}"
    _refuse_first(is_outside, f"lists a key block outside 0 to {num_kv_blocks - 1} {place}")
    column = torch.where(is_counted, indices, num_kv_blocks)
    occurrences = torch.zeros((*counts.shape, num_kv_blocks + 1), dtype=torch.int32, device=indices.device)
    occurrences = occurrences.scatter_add(-1, column, torch.ones_like(column, dtype=torch.int32))[..., :num_kv_blocks]
    _refuse_first(occurrences > 1, "lists key block {3} twice for query block {2} of head {1}, prompt {0}")
    return from_block_map(
        occurrences > 0, q_len, kv_len, block_size=block_size, window=window, attention_mask=attention_mask, q_offset=q_offset
    )


def _check_lengths(q_len: int, kv_len: int, block_size: int, window: int | None, q_offset: int | None) -> None:
    check_block_size(block_size)
    for name, number in {"q_len": q_len, "kv_len": kv_len, "window": 1 if window is None else window}.items():
        check_count(name, number, 1, "tokens")
    if q_len > kv_len:
        raise ValueError(f"q_len must be at most kv_len = {kv_len}; got {q_len}")
    if q_offset is not None:
        check_offset(q_offset, q_len, kv_len)


def _check_values(name: str, tensor: object, elements: str) -> None:
    """Raise unless `tensor` is a plain tensor of `elements` ("integers" or "bool or integers") whose values can be read."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor of {elements}; got {type(tensor).__name__}")
    check_plain(name, tensor)
    if not is_integer(tensor) and (tensor.dtype != torch.bool or "bool" not in elements):
        raise TypeError(f"{name} must be a tensor of {elements}; got {tensor.dtype}")
    if is_fake(tensor):
        raise ValueError(f"{name} must hold values; got a fake tensor")


def _refuse_first(is_wrong: Tensor, message: str) -> None:
    """Raise ValueError for the first True entry; `message` has fields for its indices, by number."""
    if bool(is_wrong.any()):
        place = is_wrong.nonzero()[0].tolist()
        raise ValueError(f"the selection {message.format(*place)}")
