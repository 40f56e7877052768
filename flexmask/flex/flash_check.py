"""The numeric check of the FLASH kernel on `flash_case`, and its verdicts: one per kind of call and device."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import any_thread_exports, in_dispatch_mode, in_transform, is_traced
from flexmask.base.inputs import AttentionInputs
from flexmask.flex.block_mask import parts_of
from flexmask.flex.flash import flash_attention
from flexmask.flex.flash_case import FlashKind, exact_attention, flash_case, normal_numbers
from flexmask.flex.run import run_flex_attention
from flexmask.logged_once import first_time

_log = logging.getLogger("flexmask")
# absolute and relative, of outputs around 1; a wrong block changes them by about 1
_TOLERANCE = 2e-2
_LSE_TOLERANCE = 1e-3
# the kernel's tanh is approximate
_CAPPED_LSE_TOLERANCE = 1e-2
# by which the returned log-sum-exp is multiplied; torch before 2.13 returns ln 2 of it (pytorch#181645)
LSE_FACTORS = (1.0, 1 / math.log(2))
NO_LSE_GRADIENT = "FlexAttention does not differentiate its log-sum-exp"

Kernel = Callable[[AttentionInputs, BlockMask, bool], tuple[Tensor, Tensor | None]]


class Verdict(NamedTuple):
    """The outcome of FLASH's check of one kind of call: output and log-sum-exp."""

    reason: str = ""  # why FLASH cannot run them; empty where it can
    lse_reason: str = ""  # why it cannot return their log-sum-exp; empty where it can
    lse_factor: float = 1.0  # the true log-sum-exp over the one that the kernel returns
    seconds: float = 0.0  # that the check took
    error: float | None = None  # the largest error of a right output
    lse_error: float | None = None  # the largest error of a right log-sum-exp, times `lse_factor`


def check_flash(kind: FlashKind, device: torch.device, kernel: Kernel | None = None) -> Verdict:
    """Compare the kernel's output with float64 attention over the pairs of the mask.

    `kernel` replaces it in tests. An exception counts as a failed check.
    """
    kernel = kernel or functools.partial(_attend, kind)
    start = time.perf_counter()
    try:
        with torch.autocast(device.type, enabled=False), torch.set_grad_enabled(kind.needs_grad):
            verdict = _compared(kind, device, kernel)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        verdict = Verdict(reason=f"its check here raised {_in_words(error)}")
    return verdict._replace(seconds=time.perf_counter() - start)


def _attend(kind: FlashKind, inputs: AttentionInputs, mask: BlockMask, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    if not kind.is_direct:
        return run_flex_attention(inputs, mask, "flash", return_lse)
    parts = parts_of(mask)
    assert parts is not None
    return flash_attention(inputs, parts.selection.lists, kind.block_size, return_lse)


def _in_words(error: BaseException) -> str:
    """The first line of the innermost cause; torch wraps what a kernel raises."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _compared(kind: FlashKind, device: torch.device, kernel: Kernel) -> Verdict:
    inputs, mask, visible, pairs = flash_case(kind, device)
    assert inputs.value is not None
    out, lse = kernel(inputs, mask, not kind.needs_grad)
    expected, expected_lse = exact_attention(inputs, pairs)
    # a direct call without log-sum-exp runs a kernel of its own; FlexAttention always requests the log-sum-exp
    errors = []
    for output in (kernel(inputs, mask, False)[0], out) if kind.is_direct else (out,):
        errors.append(float((output.double() - expected).detach().abs().max()))
        if _agree(output, expected):
            continue
        without_lists = exact_attention(inputs, visible)[0]
        what = "block lists ignored: outputs" if _agree(output, without_lists) else "outputs"
        return Verdict(reason=f"its check here found {what} off by {errors[-1]:.2g} ({_TOLERANCE} is allowed)")
    if kind.needs_grad:
        leaves = (inputs.query, inputs.key, inputs.value)
        weights = normal_numbers(out.shape, 3, out.dtype, device)
        got = torch.autograd.grad((out * weights).sum(), leaves)
        wanted = torch.autograd.grad((expected * weights.double()).sum(), leaves)
        for name, one, other in zip(("query", "key", "value"), got, wanted, strict=True):
            share = float((one.double() - other).abs().max() / other.abs().max())
            if not share <= _TOLERANCE:
                return Verdict(reason=f"its check here found {name}'s gradient off by {share:.1%} ({_TOLERANCE:.0%} is allowed)")
        return Verdict(lse_reason=NO_LSE_GRADIENT, error=max(errors))
    assert lse is not None
    verdict = _lse_verdict(lse.double(), expected_lse, _CAPPED_LSE_TOLERANCE if kind.has_softcap else _LSE_TOLERANCE)
    return verdict._replace(error=max(errors))


def _lse_verdict(lse: Tensor, expected: Tensor, tolerance: float) -> Verdict:
    sees = expected > -math.inf
    if not bool((lse[~sees] == -math.inf).all()):
        return Verdict(lse_reason="its check here found a log-sum-exp other than -inf in rows that see nothing")
    off = [float((lse[sees] * factor - expected[sees]).abs().max()) for factor in LSE_FACTORS]
    for factor, error in zip(LSE_FACTORS, off, strict=True):
        if error <= tolerance:
            return Verdict(lse_factor=factor, lse_error=error)
    return Verdict(lse_reason=f"its check here found the log-sum-exp off by {min(off):.2g} ({tolerance} is allowed)")


def _agree(out: Tensor, expected: Tensor) -> bool:
    """True if the outputs agree within the tolerance. False with NaN, and with anything but 0 in rows that see nothing."""
    close = (out.double() - expected).abs() <= _TOLERANCE * (1 + expected.abs())
    return bool((close & ((expected != 0) | (out == 0))).all())


_Key = tuple[str, int | None, FlashKind]
_VERDICTS: dict[_Key, Verdict] = {}
_lock = threading.Lock()


def flash_verdict(
    kind: FlashKind, device: torch.device, check: Callable[[FlashKind, torch.device], Verdict] = check_flash
) -> Verdict | None:
    """The verdict on calls of this kind, which the first call checks; None if there is none and no check can run."""
    if is_traced():
        assert not kind.is_direct
        # numbers, where a compilation has symbols
        sizes = (len(range(kind.head_dim)), len(range(kind.v_head_dim)), kind.block_size)
        flags = (kind.has_softcap, kind.has_window_or_offset, kind.has_padding, kind.shares_lists, kind.needs_grad)
        written = _recall(device.type, device.index, kind.dtype, *sizes, *flags, len(range(kind.queries_per_kv)))
        if not written:
            return None
        reason, lse_reason, factor = written.split("\n")
        return Verdict(reason, lse_reason, float(factor))
    key = (device.type, device.index, kind)
    verdict = _VERDICTS.get(key)
    if verdict is not None:
        return verdict
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_capturing or in_dispatch_mode() or in_transform() or any_thread_exports():
        if not kind.is_direct:  # it may run through FlexAttention
            _log_unchecked(key)
        return None
    with _lock:
        if key not in _VERDICTS:
            verdict = check(kind, device)
            _VERDICTS[key] = verdict
            level = logging.WARNING if verdict.reason else logging.INFO
            outcome = verdict.reason or verdict.lse_reason or "right"
            _log.log(level, "flexmask: FLASH was checked on %s (%s) in %.1f s: %s", device, kind, verdict.seconds, outcome)
        return _VERDICTS[key]


def check_for_compiled_callers(dtype: torch.dtype, head_dim: int, v_head_dim: int, has_window_or_offset: bool) -> None:
    """Check calls with these heads through FlexAttention, as compiled code makes them, if their direct kind was checked."""
    for device_type, index, kind in list(_VERDICTS):
        of_these_heads = (kind.dtype, kind.head_dim, kind.v_head_dim) == (dtype, head_dim, v_head_dim)
        if kind.is_direct and index is not None and of_these_heads:
            flex_kind = kind._replace(is_direct=False, has_window_or_offset=kind.has_window_or_offset or has_window_or_offset)
            flash_verdict(flex_kind, torch.device(device_type, index))


def _verdict_text(device_type: str, index: int | None, *kind: object) -> str:
    """A verdict as text, which torch.compile takes as a constant; empty if there is none."""
    key = (device_type, index, FlashKind(*kind))  # type: ignore[arg-type]  # the fields, one by one
    verdict = _VERDICTS.get(key)
    if verdict is None:
        _log_unchecked(key)
        return ""
    return f"{verdict.reason}\n{verdict.lse_reason}\n{verdict.lse_factor!r}"


_recall = torch.compiler.assume_constant_result(_verdict_text)


def _log_unchecked(key: _Key) -> None:
    """Log once that calls of a kind could not be checked; "auto" then takes Triton, and backend="flash" raises."""
    if first_time("not checked", key):
        _log.warning(
            "flexmask: FLASH does not run calls of this kind (%s): they were not checked before, and no check can run here (in "
            "torch.compile, a CUDA-graph capture, a dispatch mode, a torch.func transform or an export). Call flexmask.warmup "
            "first",
            key[2],
        )
