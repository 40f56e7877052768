"""Differences between releases of torch, and names that torch keeps private."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import CompileContext, TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
HAS_FLASH_BACKEND = RELEASE >= (2, 10)
HAS_CPU_KERNEL = RELEASE >= (2, 6)
# functions of constant results take modules while torch.compile traces: seen with 2.13, not with 2.11
MODULES_ARE_CONSTANTS = RELEASE >= (2, 13)
# in FlexAttention's C++ template: 2.13.0 does, 2.8.0 does not, others were not tried
CPU_TAKES_UNBACKED_SIZES = RELEASE >= (2, 13)
HAS_BMM_TO_FLOAT32 = RELEASE >= (2, 8)
HAS_TRITON = importlib.util.find_spec("triton") is not None
FROM_KV_BLOCKS = frozenset(inspect.signature(BlockMask.from_kv_blocks).parameters)
# a BlockMask stores its lengths; without, its shape and sparsity count whole blocks
KNOWS_LENGTHS = "seq_lengths" in FROM_KV_BLOCKS
# of ``mask[...]``: raises when it is called; older releases (2.8) put one there that allows every pair
SLICED_MASK_MOD = getattr(sys.modules[BlockMask.__module__], "_sliced_mask_mod_error", None)


def is_traced() -> bool:
    """True where torch.compile or torch.export traces this thread. torch's own flags are true in every thread meanwhile."""
    return torch.compiler.is_dynamo_compiling() or (in_dispatch_mode() and _has_tracing_context())


def _has_tracing_context() -> bool:
    """True if a thread in a dispatch mode is traced, as by an export without dynamo; torch 2.5.1 has no context there."""
    if RELEASE < (2, 8):
        return torch.compiler.is_compiling()  # noqa: TID251  # true only while a thread exports, in these releases
    return TracingContext.try_get() is not None


def is_exporting() -> bool:
    """True inside ``torch.export`` in this thread."""
    if torch.compiler.is_dynamo_compiling():
        return _traces_an_export()
    return is_traced() and CompileContext.try_get() is None


for _asks in (is_traced, _has_tracing_context, is_exporting):
    # dynamo traces them within their callers; alone, they would tell a caller that runs uncompiled that it is traced
    skip_code(_asks.__code__)


def any_thread_exports() -> bool:
    """True while any thread exports: torch.compile then returns the function uncompiled."""
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()  # noqa: TID251  # any thread's is meant


def in_dispatch_mode() -> bool:
    """True under a mode such as FakeTensorMode, which may make tensors that are not plain."""
    return torch._C._len_torch_dispatch_stack() > 0


def dispatch_modes() -> list[str]:
    """The names of this thread's dispatch modes."""
    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]


def is_fake(tensor: Tensor) -> bool:
    """True for a tensor of FakeTensorMode, which has no values, and for all that is computed under that mode."""
    if isinstance(tensor, FakeTensor):
        return True
    return in_dispatch_mode() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def modes_that_disable_compile() -> list[str]:
    """The names of this thread's dispatch modes under which torch.compile runs functions uncompiled, and keeps doing so later."""
    if not in_dispatch_mode():
        return []
    modes = _get_current_dispatch_mode_stack()
    return [type(mode).__name__ for mode in modes if not (mode.is_infra_mode() or _is_unseen(mode))]


def _is_unseen(mode: Any) -> bool:
    return hasattr(mode, "ignore_compile_internals") and bool(mode.ignore_compile_internals())


def has_real_storage(tensor: Tensor) -> bool:
    """False for fake tensors and inside torch.func, where compiled code would not find the values of `tensor`."""
    return is_traced() or not (is_fake(tensor) or in_transform())


def is_fake_outside(tensor: Tensor) -> bool:
    """True for a fake tensor outside of its mode, where no operator takes it together with other tensors."""
    return isinstance(tensor, FakeTensor) and not in_dispatch_mode()


def records_operators() -> bool:
    """True where torch writes this thread's operators into a graph, unless `is_traced`."""
    return torch._C._dispatch_tls_is_dispatch_key_included("PreDispatch") or torch._C._get_tracing_state() is not None


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Take this thread's torch function modes off their stack for a while: dynamo would trace them, and may not be able to."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def unsupported_tensor_kind(tensor: Tensor) -> str | None:
    """The kind of `tensor` in words, if compiled code that reads its memory would miss what it stands for; else None."""
    cls = type(tensor)
    if cls.__torch_dispatch__ is not Tensor.__torch_dispatch__ and cls is not FakeTensor:
        return f"one of type {cls.__name__}"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        return "one inside a transform of torch.func"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return "one with a tangent of forward-mode differentiation"
    if tensor.is_neg() or tensor._is_zerotensor():
        return "one whose values are not in its memory (clone it)"
    return None


def is_readable(tensor: Tensor) -> bool:
    """False where no value of `tensor` can be read: in a surrounding compilation, and if it is fake."""
    return not is_traced() and not is_fake(tensor)


def in_transform() -> bool:
    """True in a function that ``torch.func`` transforms, where new tensors are wrapped."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_under_vmap(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` current: kernels that torch does not launch go to the current one."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)


def with_dynamic(tensor: Tensor, dim: int) -> Tensor:
    """A view of `tensor` whose size in `dim` is symbolic from the first compilation on."""
    view = tensor.detach()
    torch._dynamo.maybe_mark_dynamic(view, dim)
    return view


def keep_static(tensor: Tensor) -> None:
    """Have torch.compile take the sizes of `tensor` as constants."""
    torch._dynamo.mark_static(tensor)


def materialized(tensor: Tensor) -> Tensor:
    """`tensor`, written to memory: Inductor (2.11) may compute it again for each of its readers."""
    return tensor.as_strided(tensor.shape, tensor.stride())


def runs_flex_attention_uncompiled() -> bool:
    """True inside a torch.compile whose backend is not Inductor: there flex_attention runs dense under its mask_mod."""
    return is_traced() and not _is_inductor()


def _backend_is_inductor() -> bool:
    backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    for _ in range(8):  # dynamo wraps what torch.compile was given
        if isinstance(backend, torch._TorchCompileInductorWrapper) or getattr(backend, "__name__", "") == "compile_fx":
            return True
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "_torchdynamo_orig_callable", None)
        backend = inner or getattr(backend, "compiler_fn", None)
    return False


def _dynamo_exports() -> bool:
    return bool(InstructionTranslator.current_tx().output.export)


# called while dynamo traces, which sees a bool
_is_inductor: Callable[[], bool] = torch.compiler.assume_constant_result(_backend_is_inductor)
_traces_an_export: Callable[[], bool] = torch.compiler.assume_constant_result(_dynamo_exports)


def ambient_state() -> Hashable:
    """State that torch.compile guards globally: grad and inference mode, dtype, device, autocast, threads, TF32, determinism."""
    guarded = GlobalStateGuard()
    written = guarded.__getstate__() if hasattr(guarded, "__getstate__") else None
    if isinstance(written, str):
        state: Hashable = _compared(written)
    else:  # older releases
        state = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads())
    modes = torch._C._len_torch_function_stack()  # a default device is one
    return state, torch.is_inference_mode_enabled(), modes, torch.get_default_device() if modes else None


@functools.lru_cache
def _compared(written: str) -> str:
    """The part of a serialized state that guards compare: autocast's dtypes only for devices where it is on."""
    state = json.loads(written)
    autocast = state.get("autocast_state", {})
    if "dtype" in autocast:
        autocast["dtype"] = [dtype for dtype, on in zip(autocast["dtype"], autocast["enabled"], strict=True) if on]
    return json.dumps(state)


def recompile_limit() -> str:
    """Name of the recompilation limit in torch._dynamo.config."""
    return "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"


def ran_out_of_recompilations(error: Exception) -> bool:
    """True for errors of fullgraph compilations: torch 2.8 and 2.13 raise the first, 2.6 the second, 2.5 the third."""
    return type(error).__name__ in ("FailOnRecompileLimitHit", "FailOnCacheLimitHit", "CacheLimitExceeded")
