"""`import flexmask` needs torch alone and changes nothing around it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

# `import flexmask` works where these are missing.
NOT_NEEDED = ("accelerate", "matplotlib", "tqdm", "transformers", "triton")

# Run in a process of its own, with a JSON list [module to import, names that must not be importable] as the argument.
WATCH = """
import json, logging, os, signal, sys, warnings

module, blocked = json.loads(sys.argv[1])


class Without:
    # a finder that does not see the blocked packages, for `import` and for importlib.util.find_spec alike
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else self.finder.find_spec(name, path, target)


import torch
import torch._dynamo.config
import torch._inductor.config
import torch.nn.attention.flex_attention


def surroundings():
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "random numbers": torch.random.get_rng_state().sum().item(),
        "gradients": torch.is_grad_enabled(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "sdp kernels": [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "math", "mem_efficient")],
        "CUDA started": torch.cuda.is_initialized(),
        "dynamo": torch._dynamo.config.codegen_config(),
        "inductor": torch._inductor.config.codegen_config(),
        "print options": repr(vars(torch._tensor_str.PRINT_OPTS)),
        "warnings": [list(map(str, entry)) for entry in warnings.filters],
        "logging": (logging.root.level, len(logging.root.handlers), logging.root.manager.disable),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "environment": dict(os.environ),
        "sys.path": list(sys.path),
        "import hooks": [str(type(finder)) for finder in sys.meta_path],
        "excepthook": str(sys.excepthook),
        "recursion": sys.getrecursionlimit(),
    }


# only now: torch loads some of them itself where they are installed
for name in list(sys.modules):
    if name.partition(".")[0] in blocked:
        del sys.modules[name]
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
before, loaded = surroundings(), set(sys.modules)
__import__(module)
after = surroundings()
print(json.dumps({
    "changed": sorted(key for key in before if before[key] != after[key]),
    "loaded": sorted({name.partition(".")[0] for name in set(sys.modules) - loaded} - set(sys.stdlib_module_names)),
}))
"""


def watch_import(module: str, *, blocked: tuple[str, ...] = (), folder: Path = ROOT) -> dict[str, list[str]]:
    """Import `module`, found in `folder`, in a fresh process; what it changed there, and the packages it loaded besides torch."""
    run = subprocess.run(
        [sys.executable, "-c", WATCH, json.dumps([module, blocked])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("blocked", [NOT_NEEDED, ()], ids=["torch alone", "as installed"])
def test_import_needs_torch_alone_and_changes_nothing(blocked):
    seen = watch_import("flexmask", blocked=blocked)
    assert seen["changed"] == []
    assert set(seen["loaded"]) <= {"flexmask", "triton"} - set(blocked)
    assert "flexmask" in seen["loaded"]


TAMPERING = {
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "random numbers": "torch.manual_seed(1234)",
    "gradients": "torch.set_grad_enabled(False)",
    "threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "matmul precision": "torch.set_float32_matmul_precision('high')",
    "sdp kernels": "torch.backends.cuda.enable_flash_sdp(False)",
    "dynamo": "torch._dynamo.config.cache_size_limit = 77",
    "inductor": "torch._inductor.config.max_autotune = True",
    "warnings": "warnings.simplefilter('ignore')",
    "logging": "logging.basicConfig(level='INFO')",
    "environment": "os.environ['TAMPERED'] = '1'",
    "sys.path": "sys.path.append('/nowhere')",
}


def test_tampering_at_import_is_caught(tmp_path):
    lines = ["import logging, os, sys, warnings", "import torch, helper_package", *TAMPERING.values()]
    (tmp_path / "tampering.py").write_text("\n".join(lines))
    (tmp_path / "helper_package.py").write_text("")
    seen = watch_import("tampering", folder=tmp_path)
    assert set(TAMPERING) <= set(seen["changed"])
    assert seen["loaded"] == ["helper_package", "tampering"]


@pytest.mark.parametrize(
    "name", [pytest.param("helper_package", marks=pytest.mark.slow), "sympy"]
)  # sympy: loaded by torch before
def test_blocked_package_is_missed(tmp_path, name):
    (tmp_path / "needy.py").write_text(f"import {name}")
    (tmp_path / "helper_package.py").write_text("")
    with pytest.raises(AssertionError, match=f"No module named '{name}'"):
        watch_import("needy", blocked=(name,), folder=tmp_path)
