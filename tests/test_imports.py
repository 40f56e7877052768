"""No import cycle; folders import from those below them only; the oracle imports nothing of ours."""

import ast
import graphlib
from collections.abc import Iterator

from tests.repository import ROOT, SIDE_FOLDERS

INDEX = "flexmask"
# a folder or module imports from those before it only
ORDER = (
    "_torch", "base", "plain", "kernels", "precision", "compilation", "flex", "export", "plot",
    "stats", "users_mask", "selector", "dense_policy", "select", "method", "block_masks", "attend",
    INDEX, "attention", "varlen", "warming", "settings", "found_settings", "environment",
    "integrations", "self_test", "commands", "__main__",
)  # fmt: skip
# and these from no others
BELOW: dict[str, set[str]] = {
    "plain": {"base"}, "kernels": {"_torch", "base"}, "flex": {"_torch", "base", "compilation"},
    "export": {"_torch", "base", "flex", "plain"}, "block_masks": {"_torch", "base", "kernels", "method", "plain", "selector"},
    "plot": {"base"},
}  # fmt: skip


def package_sources() -> dict[str, str]:
    """The code of every module, by its name in flexmask."""
    sources = {}
    for folder, prefix in [("flexmask", ()), *((name, (name,)) for name in SIDE_FOLDERS)]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (*prefix, *path.relative_to(ROOT / folder).with_suffix("").parts)
            if prefix or parts[0] not in SIDE_FOLDERS:
                sources[".".join(part for part in parts if part != "__init__") or INDEX] = path.read_text(encoding="utf-8")
    return sources


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
        later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):  # names of types only
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_import and not later)

    yield from visit(ast.parse(source), True)


def wrong_imports(sources: dict[str, str]) -> list[str]:
    """Upward imports, and a cycle if there is one."""
    wrong, graph = [], {}
    for module, source in sources.items():
        found = set(imported(source, set(sources)))
        # the index loads the adapter when it is asked for
        graph[module] = {name for name, at_import in found if at_import or module != INDEX} - {module}
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


def test_the_oracle_imports_nothing_of_ours():
    for path in (ROOT / "tests" / "oracle").glob("*.py"):
        if not path.name.startswith("test_"):
            assert not list(imported(path.read_text(encoding="utf-8"), set())), path.name
