"""`import flexmask` needs torch alone and changes nothing around it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

# `import flexmask` works where these are missing, and does not load them where they are there
NOT_NEEDED = ("accelerate", "matplotlib", "sglang", "transformers", "typer", "vllm")

# Run in a process of its own, with a JSON list [module to import, names that must not be importable] as the argument.
WATCH = """
import json, logging, os, sys, warnings

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
        "random numbers": torch.random.get_rng_state().sum().item(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "CUDA started": torch.cuda.is_initialized(),
        "dynamo": torch._dynamo.config.codegen_config(),
        "inductor": torch._inductor.config.codegen_config(),
        "warnings": [list(map(str, entry)) for entry in warnings.filters],
        "logging": (logging.root.level, len(logging.root.handlers)),
        "environment": dict(os.environ),
        "sys.path": list(sys.path),
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
    arguments = [sys.executable, "-c", WATCH, json.dumps([module, blocked])]
    run = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("blocked", [(*NOT_NEEDED, "triton"), ()], ids=["torch alone", "as installed"])
def test_import_needs_torch_alone_and_changes_nothing(blocked):
    seen = watch_import("flexmask", blocked=blocked)
    assert seen["changed"] == []
    assert "flexmask" in seen["loaded"]
    assert set(seen["loaded"]) <= {"flexmask", "triton"} - set(blocked)


def test_tampering_and_missing_packages_are_caught(tmp_path):
    tampering = {
        "default dtype": "torch.set_default_dtype(torch.float64)",
        "random numbers": "torch.manual_seed(1234)",
        "dynamo": "torch._dynamo.config.cache_size_limit = 77",
        "warnings": "warnings.simplefilter('ignore')",
        "environment": "os.environ['TAMPERED'] = '1'",
    }
    (tmp_path / "tampering.py").write_text("\n".join(["import os, warnings, torch, helper_package", *tampering.values()]))
    (tmp_path / "helper_package.py").write_text("")
    seen = watch_import("tampering", folder=tmp_path)
    assert set(tampering) <= set(seen["changed"])
    assert seen["loaded"] == ["helper_package", "tampering"]
    # torch has loaded sympy before
    (tmp_path / "needy.py").write_text("import sympy")
    with pytest.raises(AssertionError, match="No module named 'sympy'"):
        watch_import("needy", blocked=("sympy",), folder=tmp_path)
