"""Who may import whom, read from the source, and what `import flexmask` does to its surroundings."""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SIDE_FOLDERS = ("block_masks", "integrations")

# From the bottom up. A module imports from lines above its own only, never from its neighbours. Names are relative to flexmask;
# a side folder alone is its __init__.py. A new core module has to be given its place here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_torch", "config", "stats"),
    ("compilation",),
    ("checks", "visibility", "mask_mods", "pattern", "published", "sinks"),
    ("memory",),
    ("emit", "selection", "pooling", "sharing"),
    ("vertical_slash", "representative", "backends", "dense"),
    ("triton_scores",),
    ("triton_visibility", "triton_fewest", "triton_block_sums"),
    ("triton_*",),  # kernels and their launches, imported where there is triton
    ("search",),
    ("fused_search",),
    ("compiled_search",),
    ("flexprefill",),
    ("attention",),
    ("warmup",),
    ("block_masks.causal",),
    ("block_masks.*",),
    ("block_masks",),
    ("integrations.versions", "integrations.settings"),
    ("integrations.prefill_mask",),
    ("integrations.attention_call",),
    ("integrations.*",),
    ("integrations",),
)

# Outside the layers: what each of these may import of flexmask. Only the index imports them.
APART: dict[str, tuple[str, ...]] = {"plot": ("_torch",), "reference": ()}

# flexmask/__init__.py gathers the core and these; nothing imports it in turn.
INDEX = "flexmask"
INDEX_ALSO_IMPORTS = ("plot", "reference")

# Besides the standard library and torch. The first when the module is imported, the second only inside its functions.
AT_IMPORT: dict[str, tuple[str, ...]] = {"triton_*": ("triton",), "integrations.*": ("transformers",)}
INSIDE_FUNCTIONS: dict[str, tuple[str, ...]] = {"plot": ("matplotlib", "numpy"), "integrations.*": ("transformers", "accelerate")}

# `import flexmask` works where these are missing.
NOT_NEEDED = ("accelerate", "matplotlib", "tqdm", "transformers", "triton")


class Import(NamedTuple):
    """One imported module by its full name, and whether importing the file is enough to import it."""

    name: str
    at_import: bool
    line: int


def imports_in(source: str, module: str, modules: set[str]) -> Iterator[Import]:
    """Every import in `source`, the code of `module`; `modules` tells submodules from other names."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, at_import, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = full_name(module).split(".")
                if module not in (INDEX, *SIDE_FOLDERS):
                    package.pop()
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if inner in modules else base, at_import, node.lineno)
        for child in ast.iter_child_nodes(node):
            deferred = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                deferred = child in node.body
            yield from visit(child, at_import and not deferred)

    yield from visit(ast.parse(source), True)


def full_name(module: str) -> str:
    return INDEX if module == INDEX else f"flexmask.{module}"


def layer_of(module: str) -> int | None:
    """The module's line in LAYERS; a name spelt out goes before a pattern."""
    exact = [number for number, layer in enumerate(LAYERS) if module in layer]
    by_pattern = [number for number, layer in enumerate(LAYERS) for name in layer if fnmatch.fnmatch(module, name)]
    return next(iter(exact + by_pattern), None)


def granted(module: str, table: dict[str, tuple[str, ...]]) -> set[str]:
    return {name for pattern, names in table.items() if fnmatch.fnmatch(module, pattern) for name in names}


def may_import(module: str, target: str) -> bool:
    """Whether `module` may import `target`, both modules of flexmask."""
    if target == INDEX:
        return False
    if module == INDEX:
        return target in INDEX_ALSO_IMPORTS or (target not in APART and not target.startswith(SIDE_FOLDERS))
    if module in APART:
        return target in APART[module]
    above, below = layer_of(module), layer_of(target)
    return above is not None and below is not None and below < above


def wrong_imports(sources: dict[str, str]) -> list[str]:
    """Every import in `sources`, the code of each module by its name, that the tables do not allow."""
    modules = {full_name(module) for module in sources}
    wrong = []
    for module, source in sources.items():
        if module != INDEX and module not in APART and layer_of(module) is None:
            wrong.append(f"{module} has no place in LAYERS")
            continue
        at_import = {"torch", *granted(module, AT_IMPORT)}
        anywhere = at_import | granted(module, INSIDE_FUNCTIONS)
        for found in imports_in(source, module, modules):
            root, _, target = found.name.partition(".")
            if root == INDEX:
                allowed = may_import(module, target or INDEX)
            else:
                allowed = root in sys.stdlib_module_names or root in (at_import if found.at_import else anywhere)
            if not allowed:
                wrong.append(f"{module}, line {found.line}, imports {found.name}")
    return wrong


def package_sources() -> dict[str, str]:
    """The code of every module of flexmask, read from the folders at the root rather than through the symlinks."""
    sources = {}
    for folder, prefix in [("flexmask", ""), *((name, f"{name}.") for name in SIDE_FOLDERS)]:
        for path in sorted((ROOT / folder).glob("*.py")):
            name = (prefix.rstrip(".") or INDEX) if path.stem == "__init__" else f"{prefix}{path.stem}"
            sources[name] = path.read_text(encoding="utf-8")
    return sources


def test_imports_go_downward_only():
    sources = package_sources()
    assert INDEX in sources
    assert not wrong_imports(sources)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pooling", "from flexmask.attention import anything"),
        ("pooling", "from flexmask import attention"),
        ("pooling", "from .attention import anything"),
        ("pooling", "import flexmask.attention as attention"),
        ("pooling", "def later():\n    import flexmask.attention"),
        ("pooling", "from flexmask import FlexPrefillConfig"),
        ("pooling", "import numpy"),
        ("pooling", "if True:\n    import triton"),
        ("pooling", "from flexmask.triton_sums import anything"),
        ("pooling", "def later():\n    import transformers"),
        ("emit", "from flexmask.selection import anything"),
        ("emit", "from flexmask.reference import anything"),
        ("attention", "from flexmask.block_masks import anything"),
        ("attention", "from flexmask.plot import anything"),
        ("reference", "from flexmask._torch import anything"),
        ("plot", "import matplotlib.pyplot"),
        ("plot", "from flexmask.pooling import anything"),
        ("block_masks.one", "from flexmask.block_masks.another import anything"),
        ("block_masks.one", "from flexmask.block_masks import anything"),
        ("block_masks.one", "from flexmask.integrations.huggingface import anything"),
        (INDEX, "from flexmask.integrations.huggingface import anything"),
        ("unheard_of", "import torch"),
    ],
)
def test_upward_import_is_caught(module, source):
    others = dict.fromkeys([INDEX, "attention", "selection", "plot", "block_masks", "integrations"], "")
    assert len(wrong_imports({**others, module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pooling", "import math\nimport torch.nn.functional as F\nfrom flexmask import _torch"),
        ("attention", "from flexmask.flexprefill import flexprefill_mask\nfrom .checks import check_qkv"),
        ("fused_search", "if True:\n    from flexmask.triton_sums import sums"),
        ("triton_sums", "import triton.language as tl\nfrom flexmask.visibility import num_blocks"),
        ("plot", "def draw():\n    import matplotlib.pyplot"),
        ("plot", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import matplotlib.pyplot"),
        ("block_masks.one", "from flexmask.block_masks.causal import causal_mask\nfrom flexmask.emit import block_lists"),
        ("block_masks", "from flexmask.block_masks.one import one_mask as one_mask"),
        ("integrations.huggingface", "from transformers import Cache\nfrom flexmask.attention import flexprefill_attention"),
        (INDEX, "from flexmask.plot import plot_mask as plot_mask\nfrom flexmask.attention import anything"),
    ],
)
def test_downward_import_is_let_through(module, source):
    others = dict.fromkeys([INDEX, "_torch", "checks"], "")
    assert not wrong_imports({**others, module: source})


# The bare names of the side folders


def bare_imports(text: str) -> list[str]:
    """Lines that import a side folder without flexmask before it: from the root that works, as a second copy of every module."""
    bare = re.compile(rf"^[ \t>]*(?:from|import)[ \t]+(?:[\w. ]+,[ \t]*)*(?:{'|'.join(SIDE_FOLDERS)})\b.*", re.MULTILINE)
    return bare.findall(text)


def test_side_folders_are_imported_by_their_full_name_only():
    folders = ["flexmask", *SIDE_FOLDERS, "tests", "bench"]
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".sh")]
    paths = [path for path in [*paths, *ROOT.glob("*.md")] if path != Path(__file__).resolve()]
    found = {str(path): bare_imports(path.read_text(encoding="utf-8")) for path in paths}
    assert len(found) > 10
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line", ["import block_masks", "    from block_masks.causal import causal_mask", "import os, integrations.huggingface as hf"]
)
def test_bare_import_is_caught(line):
    assert bare_imports(f"import torch\n{line}\n") == [line]


@pytest.mark.parametrize("line", ["from flexmask.block_masks import MASKS", "import flexmask.integrations.huggingface"])
def test_full_import_is_let_through(line):
    assert not bare_imports(line)


@pytest.mark.parametrize("folder", SIDE_FOLDERS)
def test_side_folder_is_reached_through_a_symlink(folder):
    link = ROOT / "flexmask" / folder
    if not link.is_symlink():
        pytest.skip("a checkout without symlinks: flexmask has to be installed there")
    assert os.readlink(link) == f"../{folder}"
    assert (ROOT / folder).is_dir()


def test_every_package_is_installed():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for folder in SIDE_FOLDERS for path in (ROOT / folder).rglob("*.py")}
    packages = {"flexmask", *("flexmask." + ".".join(folder.parts) for folder in folders)}
    assert packages <= set(setuptools["packages"])
    assert setuptools["package-dir"] == {f"flexmask.{folder}": folder for folder in SIDE_FOLDERS}


# What importing does

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


@pytest.mark.parametrize("name", ["helper_package", "sympy"])  # sympy: loaded by torch before
def test_blocked_package_is_missed(tmp_path, name):
    (tmp_path / "needy.py").write_text(f"import {name}")
    (tmp_path / "helper_package.py").write_text("")
    with pytest.raises(AssertionError, match=f"No module named '{name}'"):
        watch_import("needy", blocked=(name,), folder=tmp_path)
