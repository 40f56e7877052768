"""Kernels as they are launched: one compilation serves all lengths, and launches of a known kind skip Triton's analysis."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# whole numbers on which no kernel is specialized: all but strides, whose divisibility wide loads need
DO_NOT_SPECIALIZE = (
    "q_len", "kv_len", "num_heads", "num_kv_heads", "heads", "num_q_blocks", "num_kv_blocks", "num_chunks", "blocks", "length",
    "distance_limit", "gamma_bits", "nearest", "cap", "min_lines", "digit_pass", "page_size", "skipped", "cached_len", "parts",
    "rows", "blocks_per_program",
)  # fmt: skip
# Triton's compiled kernels take all arguments, constexprs included, since a release between 3.1 (does not) and 3.6 (tested); in
# 3.7 and 3.9 the source says so. On AMD they are also specialized on sizes of tensors.
_COMPILED_TAKE_ALL = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6) and torch.version.hip is None


class Compiled(NamedTuple):
    """A kernel for arguments of one kind, as Triton launches it."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]

    def launch(self, grid: tuple[int, ...], stream: Any, arguments: Sequence[Any]) -> None:
        """Launch with addresses for tensors."""
        x, y, z = (*grid, 1, 1)[:3]
        self.run(x, y, z, stream, self.function, self.metadata, None, None, None, *arguments, *self.constants)


class Launch(NamedTuple):
    """A captured launch."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    compiled: Compiled | None  # None: Triton analyses each launch


class _Positions(NamedTuple):
    """Positions of a kernel's arguments, the same in all launches."""

    tensors: list[int]
    specialized: list[int]  # integers
    numbers: list[int]  # integers on which the kernel is not specialized
    constants: list[int]


LAUNCH_SINK: ContextVar[Callable[[Launch], None] | None] = ContextVar("flexmask_launch_sink", default=None)
"""Gets this thread's launches, while `flexmask.kernels.replay` captures those of a selection."""


class Kernel:
    """A Triton kernel, launched as ``kernel[grid](*arguments, **constants)``: every argument, constants by name.

    Triton analyses the arguments of each launch, which takes longer than the launch itself. This class finds the compiled kernel
    by what Triton specializes on: dtypes and alignments of tensors, constants, and of other numbers whether they are 1, multiples
    of 16, or need 64 bits. A launch that was seen before goes to the compiled launcher; with profilers' hooks Triton launches.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.jit = triton.jit(function, do_not_specialize=list(DO_NOT_SPECIALIZE))
        self.launched_directly = _COMPILED_TAKE_ALL and isinstance(self.jit, JITFunction)
        self._parameters = self.jit.params if self.launched_directly else []
        self._positions: _Positions | None = None
        self._compiled: dict[Hashable, Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        sink = LAUNCH_SINK.get()
        if sink is None:
            self._run(grid, arguments, constants)
            return
        # the interpreter's own operators are none of the selection's
        with _disable_current_modes():
            sink(Launch(self, grid, arguments, constants, self._run(grid, arguments, constants)))

    def _run(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Compiled | None:
        if self.launched_directly and arguments[0].is_cuda and not has_launch_hooks():
            return self._launch_directly(grid, arguments, constants)
        self.jit[grid](*arguments, **constants)
        return None

    def _launch_directly(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Compiled:
        at = self._positions or self._find_positions(arguments)
        device, passed = arguments[0].get_device(), list(arguments)
        for i in at.tensors:
            passed[i] = arguments[i].data_ptr()
        values = tuple(constants.values())
        key = (
            device,
            *[arguments[i].dtype for i in at.tensors],
            _alignment([passed[i] for i in at.tensors]),
            _divisibility([passed[i] for i in at.specialized]),
            *[passed[i] < 2**31 for i in at.numbers],
            *[passed[i] for i in at.constants],
            values,
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            by_name = tuple(parameter.name for parameter in self._parameters[len(passed) :])
            if tuple(constants)[: len(by_name)] != by_name:
                raise TypeError(f"{self.jit.__name__} takes its constants in the order {by_name}")
            kernel = self.jit[grid](*arguments, **constants)
            compiled = Compiled(kernel.run, kernel.function, kernel.packed_metadata, values[: len(by_name)])
            self._compiled[key] = compiled
        else:
            compiled.launch(grid, driver.active.get_current_stream(device), passed)
        return compiled

    def _find_positions(self, arguments: tuple[Any, ...]) -> _Positions:
        positions = _Positions([], [], [], [])
        for i, (parameter, x) in enumerate(zip(self._parameters, arguments, strict=False)):
            if parameter.is_constexpr:
                positions.constants.append(i)
            elif isinstance(x, Tensor):
                positions.tensors.append(i)
            elif isinstance(x, int):
                (positions.numbers if parameter.do_not_specialize else positions.specialized).append(i)
        self._positions = positions  # whole, for other threads
        return positions


kernel = Kernel  # as a decorator


def _alignment(addresses: list[int]) -> Hashable:
    """The alignment that Triton specializes on: True if 16 divides all addresses, else a bool each."""
    return functools.reduce(operator.or_, addresses) % 16 == 0 or tuple([address % 16 == 0 for address in addresses])


def _divisibility(numbers: list[int]) -> Hashable:
    """The properties that Triton specializes integers on; True if 16 divides all, and all take 32 bits."""
    bits = functools.reduce(operator.or_, numbers, 0)
    return (bits % 16 == 0 and bits < 2**31) or tuple([(n < 2**31, n % 16 == 0, n == 1) for n in numbers])


def has_launch_hooks() -> bool:
    """True if a profiler wants to see every launch."""
    knobs = getattr(triton, "knobs", None)  # since Triton 3.4, where a hook is a function or None
    hooks = () if knobs is None else (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(bool(getattr(hook, "calls", hook)) for hook in hooks)


# Triton's functions of these names unwrap constants first, which took a quarter of a mask's time in Python
def cdiv(number: int, divisor: int) -> int:
    """`number` over `divisor`, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least `number`, for numbers from 1 on."""
    return 1 << (number - 1).bit_length()


@triton.jit
def soft_capped(score, softcap):
    """``softcap * tanh(score / softcap)``; near 0 by its series, which cancels nothing."""
    x = tl.abs(score / softcap)
    grown = tl.exp2(-2 * 1.4426950408889634 * x)
    capped = softcap * (1 - grown) / (1 + grown)
    return tl.where(x < 0.03, score * (1 - x * x / 3), tl.where(score < 0, -capped, capped))
