"""The imports of every module of flexmask, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from tests.repository import ROOT, SIDE_FOLDERS

INDEX = "flexmask"
SUBFOLDERS = ("base", "plain", "kernels", "flex", "reference", "commands", "pictures", "report")


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


def package_sources() -> dict[str, str]:
    """The code of every module of flexmask, read from the folders at the root rather than through the symlinks."""
    sources = {}
    for folder, prefix in [("flexmask", ""), *((name, f"{name}.") for name in SIDE_FOLDERS)]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "flexmask" and inner[0] in SIDE_FOLDERS:
                continue
            name = prefix + ".".join(part for part in inner if part != "__init__")
            sources[name.rstrip(".") or INDEX] = path.read_text(encoding="utf-8")
    # the index of a subfolder holds its docstring and nothing else
    assert all(not ast.parse(sources.pop(folder)).body[1:] for folder in SUBFOLDERS)
    return sources
