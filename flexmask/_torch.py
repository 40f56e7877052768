"""The one place for what differs between releases of torch, and for names that torch keeps private."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

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
# whether torch.bmm multiplies half-precision tensors into float32 ones
HAS_BMM_TO_FLOAT32 = RELEASE >= (2, 8)
HAS_TRITON = importlib.util.find_spec("triton") is not None
_FROM_KV_BLOCKS = frozenset(inspect.signature(BlockMask.from_kv_blocks).parameters)
# whether a BlockMask knows the lengths that it was made for; without, its shape and sparsity count whole blocks
KNOWS_LENGTHS = "seq_lengths" in _FROM_KV_BLOCKS


class _Tf32:
    """Count of open `without_tf32` blocks in this process, and the program's setting, which the last of them restores."""

    lock = threading.Lock()
    open_blocks = 0
    restored: Any = None


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 matmuls at full precision on CUDA, whatever the program has set; its setting is put back.

    The setting belongs to the process. Blocks of several threads may overlap: the first switches TF32 off, the last restores the
    setting. Matmuls of other threads run at full precision meanwhile, and nothing keeps those threads from switching it on again.
    """
    matmul = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")
    name, off = ("fp32_precision", "ieee") if newer else ("allow_tf32", False)
    with _Tf32.lock:
        if _Tf32.open_blocks == 0:
            before = getattr(matmul, name)
            # what is read may be inherited
            inherited = newer and getattr(torch.backends, name, None) == before
            _Tf32.restored = None if before not in (True, "tf32") else "none" if inherited else before
        if _Tf32.restored is not None:
            setattr(matmul, name, off)
        _Tf32.open_blocks += 1
    try:
        yield
    finally:
        with _Tf32.lock:
            _Tf32.open_blocks -= 1
            if _Tf32.open_blocks == 0 and _Tf32.restored is not None:
                setattr(matmul, name, _Tf32.restored)


# asked once: dynamo cannot trace the question
_AUTOCAST_DEVICES = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia") if torch.amp.is_autocast_available(kind)
)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Switch autocast off on `device`: arithmetic in the dtypes of its tensors, whatever the program has set."""
    if device.type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device.type):
        # the type as text: 2.5.1 cannot trace the generic alias
        return cast("contextlib.AbstractContextManager[None]", torch.autocast(device.type, enabled=False))
    return contextlib.nullcontext()


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 where `device` has no float64: Apple's GPUs and some of Intel's."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64


def in_dispatch_mode() -> bool:
    """Return True where a mode such as FakeTensorMode may make other than plain tensors."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_under_vmap(tensor: Tensor) -> bool:
    """Return True if `tensor` stands for a batch of tensors inside ``torch.vmap``."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def with_dynamic(tensor: Tensor, dim: int) -> Tensor:
    """A view of `tensor` whose size in `dim` torch.compile takes as symbolic from the first compilation on.

    Its other sizes except the batch stay numbers: torch would make them symbolic for having seen others in a function of the same
    name, which every variant of `flexmask.compilation.compiled` is, and Inductor (2.11) fails on some graphs with symbolic heads.
    """
    view = tensor.detach()
    torch._dynamo.maybe_mark_dynamic(view, dim)
    torch._dynamo.mark_static(view, [other for other in range(1, view.dim()) if other != dim])
    return view


def keep_static(tensor: Tensor) -> None:
    """Have torch.compile take the sizes of `tensor` as numbers, whatever it has seen of others in a function of the same name."""
    torch._dynamo.mark_static(tensor)


def computed_once(tensor: Tensor) -> Tensor:
    """`tensor` itself, which Inductor then writes to memory once.

    Otherwise Inductor (2.11) recomputes a tensor that only Triton kernels of ours read, once for each of them.
    """
    return tensor.as_strided(tensor.shape, tensor.stride())


def options_for_launches() -> dict[str, Any] | None:
    """Options of torch.compile for a function that launches Triton kernels of ours.

    By default Inductor launches user-defined Triton kernels through Triton's slower Python launcher. The option for its own
    launcher does not reach the processes in which Inductor compiles kernels (2.11), so they are compiled in this one.
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
        in_passing = tensor[torch.arange(tensor.shape[0], device=tensor.device)]
        return in_passing.as_strided(in_passing.shape, in_passing.stride())
    view = tensor.detach()
    if CPU_TAKES_UNBACKED_SIZES:
        for dim, size in enumerate(view.shape):
            if size > 1:
                torch._dynamo.decorators.mark_unbacked(view, dim)
    return view


def captured_number(number: int, batch: int, device: torch.device) -> Tensor:
    """`number` in the form in which a mask_mod may capture it: (batch,) int32, read at the batch index.

    A Python int that changes between calls becomes symbolic. FlexAttention's FLASH backend (2.11) rejects symbolic scalars, and
    the CPU's C++ template misnames them like the sizes in `captured`. Numbers beyond int32 are clamped.
    """
    return captured(torch.full((batch,), min(number, 2**31 - 1), dtype=torch.int32, device=device))


def named(function: _Function, name: str) -> _Function:
    """`function` with another ``__name__``; in a surrounding compilation only where torch can trace that.

    2.8.0 can, 2.5.1 cannot, others were not tried.
    """
    if RELEASE >= (2, 8) or not torch.compiler.is_compiling():
        function.__name__ = name
    return function


def runs_flex_attention_uncompiled() -> bool:
    """Return True inside a torch.compile whose backend is not Inductor: only Inductor compiles flex_attention's block lists.

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
    """Name in torch._dynamo.config of the number of recompilations that a function may have."""
    import torch._dynamo.config as dynamo

    return "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"


def ran_out_of_recompilations(error: Exception) -> bool:
    """Tell the error of ``torch.compile(fullgraph=True)`` for a function that has used up its recompilations.

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
