"""The numeric check of FlexAttention's FLASH kernel, of one kind of call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.inputs import AttentionInputs
from flexmask.flex.flash_problem import FlashCall, exact_attention, flash_problem, normal_numbers
from flexmask.flex.run import run_flex_attention

# absolute and relative, of outputs around 1; a wrong block changes them by about 1
_TOLERANCE = 2e-2
_LSE_TOLERANCE = 1e-3
# the kernel's tanh is approximate
_CAPPED_LSE_TOLERANCE = 1e-2
# by which the returned log-sum-exp is multiplied; torch before 2.13 returns ln 2 of it (pytorch#181645)
LSE_FACTORS = (1.0, 1 / math.log(2))
NO_LSE_GRADIENT = "FlexAttention does not differentiate its log-sum-exp"

Attend = Callable[[AttentionInputs, BlockMask, bool], tuple[Tensor, Tensor | None]]


class Verdict(NamedTuple):
    """Reasons why FLASH cannot serve such calls, and why not their log-sum-exp; empty where it can."""

    reason: str = ""
    lse_reason: str = ""
    lse_factor: float = 1.0  # the true log-sum-exp over the one that FlexAttention returns
    seconds: float = 0.0
    error: float | None = None  # the largest of the output, and of the corrected log-sum-exp, where they are right
    lse_error: float | None = None


def check_flash(call: FlashCall, device: torch.device, attend: Attend | None = None) -> Verdict:
    """Compare the kernel with float64 attention under the mask expanded to pairs; waits for the device.

    A kernel that raises has its own words as the reason; only running out of memory is passed on. `attend` stands for the kernel.
    """
    start = time.perf_counter()
    try:
        with torch.autocast(device.type, enabled=False), torch.set_grad_enabled(call.gradients):
            verdict = _compared(call, device, _by_flash if attend is None else attend)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        verdict = Verdict(reason=f"its check here raised {_in_words(error)}")
    return verdict._replace(seconds=time.perf_counter() - start)


def _by_flash(inputs: AttentionInputs, mask: BlockMask, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    return run_flex_attention(inputs, mask, "flash", return_lse)


def _in_words(error: BaseException) -> str:
    """The first line of the innermost cause: torch wraps what a kernel raises."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _compared(call: FlashCall, device: torch.device, attend: Attend) -> Verdict:
    inputs, mask, visible, pairs = flash_problem(call, device)
    assert inputs.value is not None
    out, lse = attend(inputs, mask, not call.gradients)
    expected, expected_lse = exact_attention(inputs, pairs)
    off = float((out.double() - expected).detach().abs().max())
    if not _agree(out, expected):
        without_lists = exact_attention(inputs, visible.unsqueeze(1))[0]
        what = "block lists ignored: outputs" if _agree(out, without_lists) else "outputs"
        return Verdict(reason=f"its check here found {what} off by {off:.2g} ({_TOLERANCE} is allowed)")
    if call.gradients:
        leaves = (inputs.query, inputs.key, inputs.value)
        weights = normal_numbers(out.shape, 3, out.dtype, device)
        got = torch.autograd.grad((out * weights).sum(), leaves)
        wanted = torch.autograd.grad((expected * weights.double()).sum(), leaves)
        for name, one, other in zip(("query", "key", "value"), got, wanted, strict=True):
            share = float((one.double() - other).abs().max() / other.abs().max())
            if not share <= _TOLERANCE:
                return Verdict(reason=f"its check here found {name}'s gradient off by {share:.1%} ({_TOLERANCE:.0%} is allowed)")
        return Verdict(lse_reason=NO_LSE_GRADIENT, error=off)
    assert lse is not None
    verdict = _of_lse(lse.double(), expected_lse, _CAPPED_LSE_TOLERANCE if call.softcap else _LSE_TOLERANCE)
    return verdict._replace(error=off)


def _of_lse(lse: Tensor, expected: Tensor, tolerance: float) -> Verdict:
    sees = expected > -math.inf
    if not bool((lse[~sees] == -math.inf).all()):
        return Verdict(lse_reason="its check here found a log-sum-exp other than -inf in rows that see nothing")
    off = [float((lse[sees] * factor - expected[sees]).abs().max()) for factor in LSE_FACTORS]
    for factor, error in zip(LSE_FACTORS, off, strict=True):
        if error <= tolerance:
            return Verdict(lse_factor=factor, lse_error=error)
    return Verdict(lse_reason=f"its check here found the log-sum-exp off by {min(off):.2g} ({tolerance} is allowed)")


def _agree(out: Tensor, expected: Tensor) -> bool:
    """False with NaN, and with anything but 0 in rows that see nothing."""
    close = (out.double() - expected).abs() <= _TOLERANCE * (1 + expected.abs())
    return bool((close & ((expected != 0) | (out == 0))).all())
