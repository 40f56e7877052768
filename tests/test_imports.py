"""No import cycle; folders import from those below them only; `import flexmask` needs torch alone and changes nothing."""

import ast
import graphlib
import importlib
import importlib.util
import json
import re
from collections.abc import Iterator

import pytest

from tests.repository import ROOT, SIDE_FOLDERS, python

INDEX = "flexmask"
INDICES = (INDEX, "integrations.huggingface")
# a folder or module imports from those before it only
ORDER = (
    "_torch", "logged_once", "base", "plain", "kernels", "locking", "compilation", "flex", "export", "plot",
    "stats", "users_mask", "option_fields", "method", "dense_policy", "call_options", "selection", "mask_function", "block_masks",
    "attend", "plans", INDEX, "attention", "varlen", "warming", "json_settings", "settings", "environment",
    "integrations", "self_test", "commands", "__main__",
)  # fmt: skip
# and these from no others
BELOW: dict[str, set[str]] = {
    "plain": {"base"}, "kernels": {"_torch", "base"}, "flex": {"_torch", "base", "compilation", "kernels", "logged_once"},
    "export": {"_torch", "base", "flex", "plain"}, "plot": {"base"},
    "block_masks": {"_torch", "base", "kernels", "mask_function", "method", "plain"},
}  # fmt: skip
# imports for types only that close a circle
CIRCLES = {("integrations.inspect.page", "integrations.inspect")}


def package_sources() -> dict[str, str]:
    """The code of every module, by its name in flexmask."""
    sources = {}
    for folder, prefix in [("flexmask", ()), *((name, (name,)) for name in SIDE_FOLDERS)]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (*prefix, *path.relative_to(ROOT / folder).with_suffix("").parts)
            if prefix or parts[0] not in SIDE_FOLDERS:
                sources[".".join(part for part in parts if part != "__init__") or INDEX] = path.read_text(encoding="utf-8")
    return sources


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(source: str, modules: set[str]) -> Iterator[tuple[str, bool]]:
    """Each module of flexmask that `source` imports, and whether at import time."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [each if each.removeprefix("flexmask.") in modules else node.module or "" for each in inner]
        yield from ((name.removeprefix("flexmask."), at_import) for name in names if name.partition(".")[0] == INDEX)
        later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or is_for_types(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not later)

    yield from visit(ast.parse(source), True)


def wrong_imports(sources: dict[str, str]) -> list[str]:
    """Upward imports, and a cycle if there is one."""
    wrong, graph = [], {}
    for module, source in sources.items():
        found = set(imported(source, set(sources)))
        # the indices load what they name when it is asked for
        later = {name for name, _ in found if module in INDICES or (module, name) in CIRCLES}
        graph[module] = {name for name, at_import in found if at_import or name not in later} - {module}
        own = module.partition(".")[0]
        if own not in ORDER:
            wrong.append(f"{module} has no place in the order")
            continue
        for target in sorted(graph[module]):
            folder = target.partition(".")[0]
            allowed = BELOW.get(own, set(ORDER[: ORDER.index(own)])) - ({INDEX} if own not in ("commands", "__main__") else set())
            if folder != own and folder not in allowed and own != INDEX:
                wrong.append(f"{module} imports {target}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        wrong.append(" -> ".join(error.args[1]))
    return wrong


def test_imports_go_downward_only():
    sources = package_sources()
    assert {INDEX, "attention", "base.inputs", "block_masks.hybrid", "integrations"} <= set(sources)
    assert not wrong_imports(sources)


def test_each_circle_of_types_is_there(monkeypatch):
    sources = package_sources()
    for pair in CIRCLES:
        monkeypatch.setitem(globals(), "CIRCLES", CIRCLES - {pair})
        assert wrong_imports(sources), pair


def test_the_oracle_imports_nothing_of_ours():
    for path in (ROOT / "tests" / "oracle").glob("*.py"):
        if not path.name.startswith("test_"):
            assert not list(imported(path.read_text(encoding="utf-8"), set())), path.name


SHORT = (
    "import block_masks",
    "from integrations.vllm import x",
    ">>> import torch, integrations",
    "    from block_masks import hybrid",
)
FULL = ("from flexmask import METHODS, block_masks", "import flexmask.integrations", "from flexmask.block_masks import METHODS")


def test_the_hook_finds_side_folders_by_their_short_name():
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    pattern = re.search(r"entry: '(.*)'", text)[1]
    assert all(re.search(pattern, line) for line in SHORT) and not any(re.search(pattern, line) for line in FULL)
    assert "exclude:" not in text
    for folder in ("flexmask", "tests", "bench", "docs", *SIDE_FOLDERS):
        for path in (ROOT / folder).rglob("*.[pm][yd]"):
            assert not re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE), path


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
# it loads them when they are asked for; the adapter's needs transformers
public = [getattr(flexmask, name) for name in flexmask.__all__ if name != "sparse_prefill"]
after = surroundings()
print(json.dumps({
    "changed": sorted(key for key in before if before[key] != after[key]),
    "loaded": sorted({name.partition(".")[0] for name in set(sys.modules) - loaded} - set(sys.stdlib_module_names)),
}))
"""


@pytest.mark.parametrize("blocked", [(*NOT_NEEDED, "triton"), ()], ids=["torch alone", "as installed"])
def test_import_needs_torch_alone_and_changes_nothing(blocked):
    seen = json.loads(python("-c", WATCH, json.dumps(blocked)).splitlines()[-1])
    assert seen["changed"] == [] and "flexmask" in seen["loaded"]
    assert set(seen["loaded"]) <= {"flexmask", "triton"} - set(blocked)


def test_torch_waits_until_it_is_needed():
    """It takes seconds to load; of the program tests/commands/test_doctor.py tests the same."""
    assert python("-c", "import sys, flexmask; print('torch' in sys.modules)") == "False\n"


@pytest.mark.parametrize(
    "code",
    [
        "from flexmask import METHODS; print('hybrid' in METHODS)",
        "from flexmask.block_masks import METHODS; print('hybrid' in METHODS)",
        "from bench.fidelity.settings import Setting; print(Setting('hybrid', {}).layer_method().name == 'hybrid')",
    ],
)
def test_the_table_of_methods_is_whole_whatever_is_imported_first(code):
    assert python("-c", code) == "True\n"


def test_what_tests_and_benchmarks_import_exists():
    """With `--doctest-ignore-import-errors` pytest skips a module that imports a name that is gone."""
    paths = (path for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py"))
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    named = {(node.module or "", alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    for module, name in named:
        # other tests may have loaded the engines' modules with a stand-in of the engine
        if not re.match(r"flexmask\b(?!\.integrations\.(vllm|sglang))", module):
            continue
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == INDEX:
                raise
            continue  # an optional package
        is_module = hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}")
        assert hasattr(found, name) or is_module, f"{module}.{name}"
