"""The one place for what differs between releases of torch, and for names that torch keeps private."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_Function = TypeVar("_Function", bound=Callable[..., Any])

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
HAS_FLASH_BACKEND = RELEASE >= (2, 10)
# whether FlexAttention has a kernel for CPUs
HAS_CPU_KERNEL = RELEASE >= (2, 6)
# whether FlexAttention's C++ template takes tensors with unbacked sizes: 2.13.0 does, 2.8.0 does not, others were not tried
CPU_TAKES_UNBACKED_SIZES = RELEASE >= (2, 13)
HAS_TRITON = importlib.util.find_spec("triton") is not None
_FROM_KV_BLOCKS = frozenset(inspect.signature(BlockMask.from_kv_blocks).parameters)
# whether a BlockMask knows the lengths that it was made for; without, its shape and sparsity count whole blocks
KNOWS_LENGTHS = "seq_lengths" in _FROM_KV_BLOCKS


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 products at full precision on CUDA, whatever the program has set; its setting is put back.

    The setting is the process's: threads that multiply meanwhile do so at full precision too.
    """
    matmul = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")
    name, off = ("fp32_precision", "ieee") if newer else ("allow_tf32", False)
    before = getattr(matmul, name)
    if before not in (True, "tf32"):
        yield
        return
    setattr(matmul, name, off)
    try:
        yield
    finally:
        # what was read may have been inherited
        inherited = newer and getattr(torch.backends, name, None) == before
        setattr(matmul, name, "none" if inherited else before)


def with_dynamic(tensor: Tensor, dim: int) -> Tensor:
    """A view of `tensor` whose size in `dim` torch.compile takes as symbolic from the first compilation on.

    Its other sizes but the batch stay numbers: torch would make them symbolic for having seen others in a function of the same
    name, which every variant of `flexmask.compilation.compiled` is, and Inductor (2.11) fails on some graphs with symbolic heads.
    """
    view = tensor.detach()
    torch._dynamo.maybe_mark_dynamic(view, dim)
    torch._dynamo.mark_static(view, [other for other in range(1, view.dim()) if other != dim])
    return view


def computed_once(tensor: Tensor) -> Tensor:
    """`tensor` itself, which Inductor then writes to memory once.

    Else (2.11) it computes what no kernel of its own needs in memory anew for every Triton kernel of ours that reads it.
    """
    return tensor.as_strided(tensor.shape, tensor.stride())


def options_for_launches() -> dict[str, Any] | None:
    """Options of torch.compile for a function that launches Triton kernels of ours.

    Inductor launches its own kernels from C++, but those of others through Triton's slower Python unless it is told otherwise.
    What it is told does not reach the processes in which it compiles kernels (2.11), so that these are compiled in this one.
    """
    import torch._inductor.config as inductor

    name = "static_launch_user_defined_triton_kernels"
    return {name: True, "compile_threads": 1} if hasattr(inductor, name) else None


def captured(tensor: Tensor) -> Tensor:
    """`tensor` in the form in which a mask_mod may capture it: itself on accelerators, one that torch can compile on CPUs.

    The template of FlexAttention's C++ kernel (2.8.0, 2.13.0) puts its own variables into the generated code by replacing text:
    ``ks1`` by ``cur_qSplitSize``. That also makes ``ks12``, the symbolic size s12 of a captured tensor, ``cur_qSplitSize2``,
    which nothing declares. Sizes marked as unbacked are called ``ku0`` and stay as they are; like symbolic ones they serve all
    lengths with one compilation. A size of 1 is never symbolic.

    In a surrounding compilation nothing can be marked, and symbolic sizes may still fail. What does fail there at any size is a
    captured tensor that Inductor would compute in passing: the kernel needs it in memory, where as_strided puts it. Indexing
    with a range keeps Inductor from taking a constant for what it is and leaving that step out.
    """
    if tensor.device.type != "cpu":
        return tensor
    if torch.compiler.is_compiling():
        in_passing = tensor[torch.arange(tensor.shape[0])]
        return in_passing.as_strided(in_passing.shape, in_passing.stride())
    view = tensor.detach()
    if CPU_TAKES_UNBACKED_SIZES:
        for dim, size in enumerate(view.shape):
            if size > 1:
                torch._dynamo.decorators.mark_unbacked(view, dim)
    return view


def captured_int(number: int, device: torch.device) -> int | Tensor:
    """`number` in the form in which a mask_mod may capture it: on CPUs a tensor.

    Numbers that change from call to call become symbolic and are then called like the sizes in `captured`.
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        return number
    return torch.tensor(number)


def named(function: _Function, name: str) -> _Function:
    """`function` with another ``__name__``; in a surrounding compilation only where torch can trace that.

    2.8.0 can, 2.5.1 cannot, others were not tried.
    """
    if RELEASE >= (2, 8) or not torch.compiler.is_compiling():
        function.__name__ = name
    return function


def runs_flex_attention_uncompiled() -> bool:
    """Whether a surrounding torch.compile has another backend than Inductor, which alone compiles flex_attention's block lists.

    "eager" and "aot_eager" run the graph as it was traced, and there flex_attention is dense under its mask_mod.
    """
    return torch.compiler.is_compiling() and not _is_inductor()


def _backend_is_inductor() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    for _ in range(8):  # dynamo wraps what torch.compile was given
        if isinstance(backend, torch._TorchCompileInductorWrapper) or getattr(backend, "__name__", "") == "compile_fx":
            return True
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "_torchdynamo_orig_callable", None)
        backend = inner or getattr(backend, "compiler_fn", None)
    return False


# called while dynamo traces, which then sees a bool
_is_inductor: Callable[[], bool] = torch.compiler.assume_constant_result(_backend_is_inductor)


def recompile_limit() -> str:
    """What torch._dynamo.config calls the number of recompilations that a function may have."""
    import torch._dynamo.config as dynamo

    return "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"


def ran_out_of_recompilations(error: Exception) -> bool:
    """Whether ``torch.compile(fullgraph=True)`` raised `error` because a function has used up its recompilations.

    No release runs such a function uncompiled, but the errors are not related: torch 2.8 and 2.13 raise the first, 2.6 the
    second, 2.5 the third.
    """
    return type(error).__name__ in ("FailOnRecompileLimitHit", "FailOnCacheLimitHit", "CacheLimitExceeded")


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
