"""Verdicts of this process on FlexAttention's FLASH kernel: a check per kind of call and device, before the first such call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from flexmask._torch import any_thread_exports, in_dispatch_mode, in_transform, is_traced
from flexmask.flex.flash_check import Verdict, check_flash
from flexmask.flex.flash_problem import FlashCall

_log = logging.getLogger("flexmask")
_Key = tuple[str, int | None, FlashCall]
_found: dict[_Key, Verdict] = {}
_missed: set[_Key] = set()
_lock = threading.Lock()


def flash_verdict(
    call: FlashCall, device: torch.device, check: Callable[[FlashCall, torch.device], Verdict] = check_flash
) -> Verdict | None:
    """The verdict on calls of this kind: looked up, and checked at the first such call, which waits for the device.

    None where nothing is known and nothing can run: inside ``torch.compile``, while a CUDA graph is captured, under a dispatch
    mode, in a transform of ``torch.func``, and while any thread exports, when torch compiles nothing.
    """
    if is_traced():
        # numbers, where a compilation has symbols
        written = _recall(
            device.type, device.index, call.dtype, len(range(call.head_dim)), len(range(call.v_head_dim)), *call[3:]
        )
        if not written:
            return None
        reason, lse_reason, factor = written.split("\n")
        return Verdict(reason, lse_reason, float(factor))
    key = (device.type, device.index, call)
    verdict = _found.get(key)
    if verdict is not None:
        return verdict
    if _nothing_can_run(device):
        _say_missed(key)
        return None
    with _lock:
        if key not in _found:
            verdict = check(call, device)
            _found[key] = verdict
            level = logging.WARNING if verdict.reason else logging.INFO
            outcome = verdict.reason or verdict.lse_reason or "right"
            _log.log(level, "flexmask: FLASH was checked on %s (%s) in %.1f s: %s", device, call, verdict.seconds, outcome)
        return _found[key]


def _nothing_can_run(device: torch.device) -> bool:
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return captured or in_dispatch_mode() or in_transform() or any_thread_exports()


def _known(kind: str, index: int | None, *call: object) -> str:
    """A verdict as text, which is a constant to torch.compile; empty if there is none."""
    key = (kind, index, FlashCall(*call))  # type: ignore[arg-type]  # the fields, one by one
    verdict = _found.get(key)
    if verdict is None:
        _say_missed(key)
        return ""
    return f"{verdict.reason}\n{verdict.lse_reason}\n{verdict.lse_factor!r}"


_recall = torch.compiler.assume_constant_result(_known)


def _say_missed(key: _Key) -> None:
    """Log, once, that nothing was checked; `backend` then takes Triton or raises."""
    if key not in _missed:
        _missed.add(key)
        _log.warning(
            "flexmask: FLASH was not checked before such calls (%s) were compiled or captured, where no check can run, and does "
            "not serve them: make one before, or flexmask.warmup",
            key[2],
        )
