"""The machine: versions, FlexAttention's backends, and known bad combinations."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib import metadata
from typing import Any, NamedTuple

import torch

from flexmask._torch import CPU_TAKES_UNBACKED_SIZES, HAS_CPU_KERNEL, HAS_FLASH_BACKEND, HAS_TRITON, KNOWS_LENGTHS
from flexmask.base.inputs import AttentionInputs
from flexmask.flex.backend import auto_takes_flash, chosen_backend, flash_available, has_flash_kernels, has_flash_package
from flexmask.flex.flash_case import FlashKind
from flexmask.flex.flash_check import flash_verdict

_MAX_CHARACTERS = 1000  # of an error that is shown: some list every model of transformers

# by feature: how its call differs from a plain call of head_dim 128 in bfloat16
FLASH_FEATURES: dict[str, dict[str, Any]] = {
    "plain calls": {},
    "windows and chunks": {"has_window_or_offset": True},
    "padding": {"has_padding": True},
    "soft caps": {"has_softcap": True},
    "one mask for all heads": {"shares_lists": True},
    "float16": {"dtype": torch.float16},
    "head_dim 192, values 128": {"head_dim": 192},
    "head_dim 256": {"head_dim": 256, "v_head_dim": 256},
    "blocks of 64": {"block_size": 64},
    "gradients": {"needs_grad": True},
    "called directly": {"is_direct": True},
    "windows, called directly": {"has_window_or_offset": True, "is_direct": True},
}
# releases of transformers that the adapter supports
OLDEST, NEWEST = (4, 54), (5, 24)
PACKAGES = ("flexmask", "torch", "triton", "flash-attn-4", "transformers", "accelerate", "matplotlib")


class BackendReport(NamedTuple):
    """A backend of FlexAttention: usable or not, chosen by ``"auto"`` or not, and the reason if not."""

    name: str
    usable: bool
    chosen: bool
    reason: str


class FlashReport(NamedTuple):
    """The outcome of FLASH's numeric check for a feature."""

    feature: str
    served: str  # "auto", "by name" or "no"
    lse_factor: float | None  # the true log-sum-exp over FlexAttention's; None if it returns none
    reason: str
    seconds: float


class KnownIssue(NamedTuple):
    """Something that fails (`severity` ``"error"``) or may fail (``"warning"``), and the remedy."""

    severity: str
    what: str
    remedy: str


def versions() -> dict[str, str | None]:
    """Versions of Python and of `PACKAGES`; None for those not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    # a checkout that is not installed has no metadata
    return versions | {"flexmask": sys.modules["flexmask"].__version__, "torch": torch.__version__}


def device_name(device: torch.device | str) -> str:
    device = torch.device(device)
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    is_cpu = device.type == "cpu"
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads" if is_cpu else str(device)


def backends(device: torch.device | str, dtype: torch.dtype) -> list[BackendReport]:
    """Every backend for a plain call of head_dim 128 on `device`: usable or not, and the one that ``backend="auto"`` takes."""
    x = torch.zeros(1, 1, 1, 1, device=device, dtype=dtype).expand(1, 1, 256, 128)
    inputs = AttentionInputs(x, x, x, scale=1.0)
    try:
        auto = chosen_backend("auto", inputs, 128, has_mask_mod=False).name
    except NotImplementedError:  # torch 2.5 on a CPU
        auto = ""
    reports = []
    for name in ("cpu", "triton", "flash"):
        reason = ""
        if name == "cpu":
            if x.device.type != "cpu":
                reason = f"it is for CPUs (got {x.device.type})"
            elif not HAS_CPU_KERNEL:
                reason = f"it needs torch >= 2.6 (got {torch.__version__})"
        else:
            try:
                with torch.no_grad():
                    chosen_backend(name, inputs, 128, has_mask_mod=False)
            except (NotImplementedError, ValueError) as error:
                reason = str(error).removeprefix(f'backend="{name}" ').removeprefix("cannot run here: ")
        why_not = "" if auto in ("", name) else f"{auto} is faster here"
        reports.append(BackendReport(name, not reason, name == auto, reason or why_not))
    return reports


def flash_can_run(device: torch.device | str) -> bool:
    """True if FLASH is installed and has a kernel for `device`."""
    # a tensor's device includes its index
    return flash_available() and has_flash_kernels(torch.zeros((), device=device).device)


def flash_features(device: torch.device | str) -> list[FlashReport]:
    """FLASH's numeric check of each feature on `device`, which compiles; empty where FLASH cannot run at all."""
    device = torch.zeros((), device=device).device
    reports = []
    for feature, changes in FLASH_FEATURES.items() if flash_can_run(device) else ():
        kind = FlashKind(torch.bfloat16, 128, 128)._replace(**changes)
        verdict = flash_verdict(kind, device)
        assert verdict is not None
        reason = verdict.reason or verdict.lse_reason
        served = "no" if verdict.reason else "auto" if auto_takes_flash(kind) else "by name"
        reports.append(FlashReport(feature, served, None if reason else verdict.lse_factor, reason, verdict.seconds))
    return reports


def known_issues(device: torch.device | str) -> list[KnownIssue]:
    """Known bad combinations of releases, environment variables and `device`; errors come first."""
    device = torch.device(device)
    on_cpu, on_nvidia = device.type == "cpu", device.type == "cuda" and torch.version.hip is None
    major = torch.cuda.get_device_capability(device)[0] if on_nvidia else None
    variables = {name: os.environ.get(name, "0") for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TRITON_INTERPRET")}
    is_set = {name: value for name, value in variables.items() if value not in ("", "0")}
    interpreted = is_set.pop("TRITON_INTERPRET", None) is not None
    compiler = os.environ.get("CXX") or {"Darwin": "clang++", "Windows": "cl"}.get(platform.system(), "g++")
    compare = "run the self-test and compare logits"
    # whether it holds, severity, what, remedy
    conditions = [
        *((True, "error", f"{name}={value} switches torch.compile off, which sparse attention needs", f"unset {name}")
          for name, value in is_set.items()),
        (not on_cpu and not HAS_TRITON, "error", "triton is missing, which compiled attention needs on a GPU",
         "pip install 'flexmask[gpu]'"),
        (not on_cpu and interpreted, "warning", "TRITON_INTERPRET is set: kernels run in Triton's interpreter",
         "unset TRITON_INTERPRET"),
        (on_cpu and not HAS_CPU_KERNEL, "error",
         f"torch {torch.__version__} has FlexAttention on CUDA only: masks can be made, sparse attention raises", "torch >= 2.6"),
        (on_cpu and HAS_CPU_KERNEL and shutil.which(compiler.split()[0]) is None, "error",
         f"no C++ compiler ({compiler}): Inductor needs one to compile attention for a CPU",
         "install g++, or name a compiler in CXX"),
        (on_cpu and HAS_CPU_KERNEL and not CPU_TAKES_UNBACKED_SIZES, "warning",
         f"torch {torch.__version__} may fail to compile FlexAttention on a CPU for padded batches and chunks", "torch >= 2.13"),
        (device.type not in ("cpu", "cuda"), "warning", f"attention was never run on {device.type}", compare),
        (device.type == "cuda" and not on_nvidia, "warning", "the kernels were compiled for ROCm, but never run there", compare),
        (on_nvidia and major != 9, "warning", f"compute capability {major}.x: the kernels were run on Hopper (9.0) only",
         compare),
        (major == 9 and not has_flash_package(), "warning",
         "flash-attn-4 is missing: half precision runs on the slower Triton backend",
         "pip install flash-attn-4, with torch >= 2.10"),
        (not KNOWS_LENGTHS, "warning", "torch 2.5's BlockMask rounds lengths up to whole blocks in shape, sparsity and pictures",
         "torch >= 2.6"),
        (has_flash_package() and not HAS_FLASH_BACKEND, "warning",
         f"flash-attn-4 is installed, but torch {torch.__version__} cannot use it", "torch >= 2.10"),
    ]  # fmt: skip
    return sorted((KnownIssue(*rest) for holds, *rest in conditions if holds), key=lambda issue: issue.severity != "error")


def one_line(message: object) -> str:
    """All lines of a message or an error in one, without colours, up to `_MAX_CHARACTERS`."""
    line = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(message)).split())
    line = line or type(message).__name__
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]} ... (--traceback shows all)"


def check_transformers(version: str) -> None:
    """Raise ImportError for a release that the adapter does not support."""
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not OLDEST <= release <= NEWEST:
        oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
        raise ImportError(f"flexmask supports transformers {oldest} to {newest}; got {version}")
