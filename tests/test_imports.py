"""The order of imports, read from the source."""

from __future__ import annotations

import fnmatch
import sys

import pytest

from tests.repository import SIDE_FOLDERS
from tests.source_imports import INDEX, full_name, imports_in, package_sources

# From the bottom up. A module imports from lines above its own only, never from its neighbours. Names are relative to flexmask;
# a side folder alone is its __init__.py. A new core module has to be given its place here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_torch",),
    ("compilation", "base.checks"),
    ("base.gammas",),
    ("base.inputs", "base.scores", "base.search_result"),
    ("config", "stats", "base.visibility"),
    ("base.*",),
    ("base.forced_top_p",),
    ("plain.top_p", "plain.pooling", "plain.representative", "plain.block_lists", "plain.published"),
    ("plain.pattern", "plain.vertical_slash", "plain.query_aware", "plain.row_evidence"),
    ("plain.hybrid",),
    ("plain.search",),
    ("kernels.scores", "kernels.top_p", "kernels.visibility", "kernels.pooling"),
    ("kernels.representative", "kernels.pattern", "kernels.query_aware", "kernels.query_aware_large_map"),
    ("kernels.query_aware_top_p", "kernels.vertical_slash", "kernels.last_rows", "kernels.row_evidence"),
    ("kernels.block_lists",),
    ("kernels.hybrid",),
    ("kernels.search",),
    ("search",),
    ("flex.mask_mods", "flex.backend", "flex.head_groups", "flex.sinks", "flex.dense"),
    ("flex.dense_heads", "flex.block_mask", "flex.run", "block_problem"),
    ("flex.sparse", "flex.packed", "flex.joined"),
    ("gallery_method", "mask"),
    ("method",),
    ("attention",),
    ("warmup", "varlen"),
    ("block_masks.*",),
    ("block_masks",),
    ("gallery",),
    ("environment", "self_test"),
    ("pictures.style",),
    ("pictures.head_rows",),
    ("pictures.*",),
    ("plot",),
    (
        "integrations.versions",
        "integrations.settings",
        "integrations.prefill_calls",
        "integrations.models",
        "integrations.tensor_parallel",
        "integrations.gamma_allocation",
        "integrations.head_errors",
        "integrations.loss_gradient",
    ),
    ("integrations.packed", "integrations.right_padding", "integrations.measured_errors"),
    ("integrations.run_calls", "integrations.run_pictures"),
    ("integrations.run_totals",),
    ("integrations.run_summary", "integrations.run_files"),
    ("integrations.recorded_run",),
    ("integrations.prefill_mask", "integrations.run"),
    ("integrations.route", "integrations.blocks"),
    ("integrations.attention_call", "integrations.head_probe"),
    ("integrations.hooks", "integrations.registration", "integrations.tune_result"),
    ("integrations.tune", "integrations.layer_plan"),
    ("integrations.inspection_heads", "integrations.inspection_maps"),
    ("integrations.inspection_calls",),
    ("integrations.vllm.versions", "integrations.vllm.options", "integrations.vllm.plan", "integrations.vllm.pages"),
    ("integrations.vllm.layers", "integrations.vllm.step", "integrations.vllm.counters", "integrations.vllm.cpu_pages"),
    ("integrations.vllm.attend", "integrations.vllm.cpu_impl", "integrations.vllm.warm_sizes"),
    ("integrations.vllm.startup",),
    ("integrations.vllm.engine",),
    ("integrations.vllm.impl", "integrations.vllm.builder"),
    ("integrations.vllm.backends",),
    ("integrations.huggingface",),
    (
        "integrations.lm_eval.arguments",
        "integrations.lm_eval.batches",
        "integrations.lm_eval.densities",
        "integrations.lm_eval.greedy",
    ),
    ("integrations.lm_eval.model",),
    ("integrations.lm_eval",),
    ("integrations.*",),
    ("integrations.vllm",),
    ("integrations",),
    ("integrations.side_by_side",),
    ("report.images", "report.style"),
    ("report.page",),
    ("report.write",),
    ("commands.exit_codes",),
    ("commands.errors", "commands.output"),
    ("commands.options", "commands.loading"),
    ("commands.*",),
    ("commands.app",),
    ("commands.main",),
    ("__main__",),
)

# What each of these may import of flexmask, whatever its place. The pictures know nothing of what they draw.
APART: dict[str, tuple[str, ...]] = {
    "plot": ("_torch", "pictures.*"),
    "pictures.*": ("_torch", "pictures.style", "pictures.head_rows"),
    "reference.*": ("reference.*",),
}

# The program stands on top: it alone may import the index, which does not import it.
PROGRAM = ("commands.", "report.", "__main__")

# flexmask/__init__.py gathers the core and these; nothing but the program imports it in turn.
INDEX_ALSO_IMPORTS = ("plot",)

# Besides the standard library and torch. The first when the module is imported, the second only inside its functions.
AT_IMPORT: dict[str, tuple[str, ...]] = {
    "kernels.*": ("triton",),
    "integrations.*": ("transformers",),
    "integrations.lm_eval*": ("lm_eval",),
    "commands.*": ("typer", "rich"),
    # the rest of the plug-in is tested without vLLM
    "integrations.vllm.impl": ("vllm",),
    "integrations.vllm.builder": ("vllm",),
}
INSIDE_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "plot": ("matplotlib", "numpy"),
    "pictures.*": ("matplotlib", "numpy"),
    "integrations.*": ("transformers", "accelerate", "matplotlib"),
    "integrations.recorded_run": ("pandas",),
    "integrations.vllm.*": ("vllm", "prometheus_client"),
    "report.*": ("matplotlib",),
    "commands.*": ("transformers", "matplotlib"),
}


def layer_of(module: str) -> int | None:
    """The module's line in LAYERS; a name spelt out goes before a pattern."""
    exact = [number for number, layer in enumerate(LAYERS) if module in layer]
    by_pattern = [number for number, layer in enumerate(LAYERS) for name in layer if fnmatch.fnmatch(module, name)]
    return next(iter(exact + by_pattern), None)


def matching(module: str, table: dict[str, tuple[str, ...]]) -> str | None:
    """The first pattern of `table` that `module` falls under."""
    return next((pattern for pattern in table if fnmatch.fnmatch(module, pattern)), None)


def granted(module: str, table: dict[str, tuple[str, ...]]) -> set[str]:
    return {name for pattern, names in table.items() if fnmatch.fnmatch(module, pattern) for name in names}


def may_import(module: str, target: str) -> bool:
    """True if `module` may import `target`, both modules of flexmask."""
    if target == INDEX:
        return module.startswith(PROGRAM)
    if module == INDEX:
        return target in INDEX_ALSO_IMPORTS or (
            matching(target, APART) is None and not target.startswith((*SIDE_FOLDERS, *PROGRAM))
        )
    apart = matching(module, APART)
    if apart is not None:
        return any(fnmatch.fnmatch(target, pattern) for pattern in APART[apart])
    above, below = layer_of(module), layer_of(target)
    return above is not None and below is not None and below < above


def wrong_imports(sources: dict[str, str]) -> list[str]:
    """Every import in `sources`, the code of each module by its name, that the tables do not allow."""
    modules = {full_name(module) for module in sources}
    wrong = []
    for module, source in sources.items():
        if module != INDEX and matching(module, APART) is None and layer_of(module) is None:
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


def test_imports_go_downward_only():
    sources = package_sources()
    assert INDEX in sources
    assert not wrong_imports(sources)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plain.pooling", "from flexmask.attention import anything"),
        ("plain.pooling", "from flexmask import attention"),
        ("plain.pooling", "from ..attention import anything"),
        ("plain.pooling", "import flexmask.attention as attention"),
        ("plain.pooling", "def later():\n    import flexmask.attention"),
        ("plain.pooling", "from flexmask import FlexPrefillConfig"),
        ("plain.pooling", "import numpy"),
        ("plain.pooling", "if True:\n    import triton"),
        ("plain.pooling", "from flexmask.kernels.sums import anything"),
        ("plain.pooling", "def later():\n    import transformers"),
        ("plain.block_lists", "from flexmask.plain.top_p import anything"),
        ("plain.block_lists", "from flexmask.reference.flexprefill import anything"),
        ("attention", "from flexmask.block_masks import anything"),
        ("attention", "from flexmask.plot import anything"),
        ("reference.flexprefill", "from flexmask._torch import anything"),
        ("plot", "import matplotlib.pyplot"),
        ("plot", "from flexmask.plain.pooling import anything"),
        ("block_masks.one", "from flexmask.block_masks.another import anything"),
        ("block_masks.one", "from flexmask.block_masks import anything"),
        ("block_masks.one", "from flexmask.integrations.huggingface import anything"),
        (INDEX, "from flexmask.integrations.huggingface import anything"),
        ("unheard_of", "import torch"),
    ],
)
def test_upward_import_is_caught(module, source):
    others = dict.fromkeys([INDEX, "attention", "plain.top_p", "plot", "block_masks", "integrations"], "")
    assert len(wrong_imports({**others, module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plain.pooling", "import math\nimport torch.nn.functional as F\nfrom flexmask import _torch"),
        ("attention", "from flexmask.mask import flexprefill_mask\nfrom .base.checks import check_qkv"),
        ("search", "if True:\n    from flexmask.kernels.top_p import sums"),
        ("kernels.top_p", "import triton.language as tl\nfrom flexmask.base.visibility import num_blocks"),
        ("plot", "def draw():\n    import matplotlib.pyplot"),
        ("plot", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import matplotlib.pyplot"),
        (
            "block_masks.one",
            "from flexmask.method import mask_method\nfrom flexmask.plain.top_p import top_p",
        ),
        ("block_masks", "from flexmask.block_masks.one import one_mask as one_mask"),
        ("integrations.huggingface", "from transformers import Cache\nfrom flexmask.attention import flexprefill_attention"),
        (INDEX, "from flexmask.plot import plot_mask as plot_mask\nfrom flexmask.attention import anything"),
    ],
)
def test_downward_import_is_let_through(module, source):
    others = dict.fromkeys([INDEX, "_torch", "base.checks"], "")
    assert not wrong_imports({**others, module: source})
