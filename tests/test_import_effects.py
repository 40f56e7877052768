"""`import flexmask` needs torch alone and changes nothing around it."""

import json
import subprocess
import sys

import pytest

from tests.repository import ROOT

# neither needed nor loaded
NOT_NEEDED = ("accelerate", "matplotlib", "sglang", "transformers", "typer", "vllm")

# Run in its own process; the argument is a JSON list of packages that must not be importable.
WATCH = """
import json, logging, os, sys, warnings
blocked = json.loads(sys.argv[1])
class Without:
    # a finder that does not see the blocked packages, for `import` and importlib.util.find_spec
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
# torch itself loads some of them
for name in list(sys.modules):
    if name.partition(".")[0] in blocked:
        del sys.modules[name]
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
before, loaded = surroundings(), set(sys.modules)
import flexmask
# it loads them when they are asked for; the adapter's two need transformers
public = [getattr(flexmask, name) for name in flexmask.__all__ if name not in ("sparse_prefill", "tune")]
after = surroundings()
print(json.dumps({
    "changed": sorted(key for key in before if before[key] != after[key]),
    "loaded": sorted({name.partition(".")[0] for name in set(sys.modules) - loaded} - set(sys.stdlib_module_names)),
}))
"""


def printed(*arguments: str) -> str:
    run = subprocess.run([sys.executable, "-c", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("blocked", [(*NOT_NEEDED, "triton"), ()], ids=["torch alone", "as installed"])
def test_import_needs_torch_alone_and_changes_nothing(blocked):
    seen = json.loads(printed(WATCH, json.dumps(blocked)).splitlines()[-1])
    assert seen["changed"] == [] and "flexmask" in seen["loaded"]
    assert set(seen["loaded"]) <= {"flexmask", "triton"} - set(blocked)


@pytest.mark.parametrize("module", ["flexmask", "flexmask.commands.app"])
def test_torch_waits_until_it_is_needed(module):
    """It takes seconds to load: until then the program has printed nothing, not even its help."""
    if module != "flexmask":
        pytest.importorskip("typer")
    code = f"import sys, {module}; print('torch' in sys.modules)"
    assert printed(code) == "False\n"


@pytest.mark.parametrize(
    "code",
    [
        "from flexmask import METHODS; print('hybrid' in METHODS)",
        "from flexmask.block_masks import METHODS; print('hybrid' in METHODS)",
        "from bench.fidelity.settings import Setting; print(Setting('hybrid', {}).selector().method.name == 'hybrid')",
    ],
)
def test_the_table_of_methods_is_whole_whatever_is_imported_first(code):
    assert printed(code) == "True\n"
