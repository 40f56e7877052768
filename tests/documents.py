"""Code blocks of the repository's Markdown pages, and checks of code that is not run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from flexmask import METHODS
from tests.repository import ROOT

# pages whose code is checked, from the root
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
    "block_masks/README.md",
    "integrations/README.md",
    "bench/README.md",
    "bench/retriever/README.md",
    "bench/ruler_model/README.md",
)
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_NEEDS = re.compile(r"# needs: (?P<what>\S.*)")
UNKNOWN = "is no command that this check knows"
OTHERS = ("cd", "git", "pip", "pre-commit", ".", "source", "torchrun", "curl", "cat", "echo", "export", "lm_eval", "vllm")
SHELLS = ("sh", "bash", "shell", "console")


class Block(NamedTuple):
    """A fenced block: language, code, lines before the code, and what it needs."""

    language: str
    code: str
    line: int
    needs: str | None


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page; a first line ``# needs: a GPU`` marks one that is not run."""
    found = []
    for match in _BLOCK.finditer(text):
        indent, code = match["indent"], match["code"]
        code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE) if indent else code
        needs = _NEEDS.match(code)
        found.append(Block(match["language"], code, text.count("\n", 0, match.start("code")), needs["what"] if needs else None))
    return found


def of_page(page: str, *languages: str) -> list[Block]:
    """The blocks of a page in some languages."""
    return [block for block in blocks((ROOT / page).read_text(encoding="utf-8")) if block.language in languages]


def unknown_names(code: str, names: dict[str, Any]) -> list[str]:
    """Names and keywords of a block that do not exist; `names` grows by its imports.

    Passes over packages that are not installed, and calls of anything but imported functions and classes.
    """
    wrong = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            wrong += [problem for alias in node.names for problem in _import(node, alias, names)]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and (called := _called(node.func, names)) is not None:
            known = _keywords(called)
            given = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
            wrong += [
                f"{ast.unparse(node.func)}() has no keyword {each}" for each in given if known is not None and each not in known
            ]
    return wrong


def wrong_commands(code: str) -> Iterator[str]:
    """Commands, make targets, modules, extras and options of a shell block that do not exist."""
    for words in _commands(code):
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables in front of a command
            words = words[1:]
        if words:
            yield from _wrong_command(words)


def _commands(code: str) -> Iterator[list[str]]:
    """The words of each command; open quotes continue on the next line."""
    line = ""
    for part in code.replace("\\\n", " ").splitlines():
        line = f"{line}\n{part}" if line else part.removeprefix("$ ")
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # no closing quotation
            continue
        line = ""
        for is_operator, command in itertools.groupby(words, lambda word: set(word) <= set(";|&")):
            if not is_operator:
                yield list(command)
    if line:
        yield ["an open quotation"]


def _wrong_command(words: list[str]) -> Iterator[str]:
    program, rest = words[0], words[1:]
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        yield from (f"make has no target {word}" for word in rest if "=" not in word and word not in targets)
    elif program in ("python", "python3", "torchrun") and "-m" in rest:
        at = rest.index("-m") + 1
        yield from _wrong_module(rest[at], rest[at + 1 :])
    elif program == "pip" and rest[:1] == ["install"]:
        extras = re.findall(
            r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().partition("optional-dependencies]")[2], re.MULTILINE
        )
        for word in rest:
            if found := re.fullmatch(r"(?:\.|flexmask)\[([\w,]+)\]", word):
                yield from (f"there is no extra {extra}" for extra in found[1].split(",") if extra not in extras)
    elif program == "flexmask":
        yield from _wrong_flexmask(rest)
    elif program not in OTHERS:
        yield f"{program} {UNKNOWN}"


def _wrong_module(name: str, rest: list[str]) -> Iterator[str]:
    """A module of this repository must exist and name its options."""
    if name == "flexmask":
        yield from _wrong_flexmask(rest)
        return
    if name.partition(".")[0] not in ("bench", "flexmask", "tests"):
        return
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        yield f"there is no module {name}"
        return
    if name == "flexmask.integrations.lm_eval":
        return  # lm-evaluation-harness reads the options
    source = _source(name)
    # options that a module of the same folder adds
    for package, names in re.findall(r"^from (bench[\w.]*) import ([\w, ]+)$", source, re.MULTILINE):
        source += "".join(_source(f"{package}.{each.strip()}") for each in names.split(","))
    yield from (
        f"{name} has no option {word}" for word in rest if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source
    )


def _source(name: str) -> str:
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _wrong_flexmask(words: list[str]) -> Iterator[str]:
    """A command of the program flexmask must exist, with its options."""
    pytest.importorskip("typer")
    if importlib.util.find_spec("flexmask.commands") is None:
        pytest.skip("the program flexmask is not part of this checkout")
    from typer.main import get_command

    app = importlib.import_module("flexmask.commands.app")
    command: Any = get_command(app.app)
    while words and not words[0].startswith("-") and hasattr(command, "commands"):
        if words[0] not in command.commands:
            yield f"flexmask has no command {words[0]}"
            return
        command, words = command.commands[words[0]], words[1:]
    if command.name == "run":  # what follows its module is the module's
        words = words[: next((at for at, word in enumerate(words) if not word.startswith("-")), len(words))]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in known and word != "-":
            yield f"flexmask {command.name} has no option {word}"


def _import(node: ast.Import | ast.ImportFrom, alias: ast.alias, names: dict[str, Any]) -> Iterator[str]:
    """Enter what a statement imports under one name into `names`."""
    module = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
    top = name = module.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        return
    try:
        value = importlib.import_module(module)
        if isinstance(node, ast.ImportFrom):
            name = alias.name
            value = getattr(value, name) if hasattr(value, name) else importlib.import_module(f"{module}.{name}")
        elif alias.asname is None:
            value = importlib.import_module(top)
    except ModuleNotFoundError as error:
        yield str(error)
        return
    names[alias.asname or name] = value


def _called(function: ast.expr, names: dict[str, Any]) -> Any:
    """The object of a dotted name that starts with an import, or None."""
    if isinstance(function, ast.Name):
        return names.get(function.id)
    if isinstance(function, ast.Attribute) and (owner := _called(function.value, names)) is not None:
        return getattr(owner, function.attr, None)
    return None


def _keywords(called: Any) -> set[str] | None:
    """Keywords of a function; None if it takes any."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return None
    known = {
        parameter.name for parameter in parameters if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        module = str(getattr(called, "__module__", ""))
        if not module.startswith("flexmask."):
            return None
        known |= {option for method in METHODS.values() for option in method.defaults}
        if module.startswith("flexmask.integrations"):
            from flexmask.settings import FIELDS

            known |= {*FIELDS}
    return known
