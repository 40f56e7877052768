"""The one place for what differs between releases of torch, and for names that torch keeps private."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

HAS_FLASH_BACKEND = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
HAS_TRITON = importlib.util.find_spec("triton") is not None
_FROM_KV_BLOCKS = frozenset(inspect.signature(BlockMask.from_kv_blocks).parameters)


def matmul_float32(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of two 3-D tensors with float32 sums and a float32 result, whatever their dtype."""
    return left.float() @ right.float()


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 products at full precision on CUDA, whatever the program has set; its setting is put back.

    Inside a surrounding ``torch.compile`` it does nothing: there the program's own setting holds.
    """
    if torch.compiler.is_compiling():
        yield
        return
    matmul = torch.backends.cuda.matmul
    name, off = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, name)
    if before not in (True, "tf32"):
        yield
        return
    setattr(matmul, name, off)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def with_dynamic(tensor: Tensor, dim: int) -> Tensor:
    """A view of `tensor` whose size in `dim` torch.compile takes as symbolic from the first compilation on."""
    view = tensor.detach()
    torch._dynamo.maybe_mark_dynamic(view, dim)
    return view


def block_mask_from_lists(
    lists: tuple[Tensor, Tensor, Tensor, Tensor],
    mask_mod: Callable[..., Tensor],
    block_size: int,
    lengths: tuple[int, int],
    with_gradients: bool = False,
) -> BlockMask:
    """A BlockMask from the four tensors of its lists (partial counts and indices, full counts and indices).

    The lists by key block, twice the memory, are made only `with_gradients`: from torch 2.9 the constructor can leave them out.
    torch 2.5 knows no sequence lengths: there they are the whole blocks that the lists span.
    """
    optional: dict[str, Any] = {"seq_lengths": lengths, "compute_q_blocks": with_gradients}
    known = {name: value for name, value in optional.items() if name in _FROM_KV_BLOCKS}
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block_size, mask_mod=mask_mod, **known)
