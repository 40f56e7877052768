"""Every file, picture and anchor that a page links to exists."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import flexmask
import flexmask.integrations.huggingface as flexmask_hf
from tests.documents import blocks
from tests.repository import ROOT, module_of

SITE = module_of(ROOT / "docs/site_pages.py")
NOTEBOOKS = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/notebooks").glob("*.ipynb")}
PAGES = sorted({*SITE.PAGES} | {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} | NOTEBOOKS)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them; repeated ones end in 1."""
    found: dict[str, int] = {}
    code = {line for block in blocks(text) for line in range(block.line, block.line + block.code.count("\n") + 1)}
    for number, line in enumerate(text.splitlines()):
        if number not in code and (heading := re.match(r"#+ +(.*)", line)):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
            if found[slug]:
                found[f"{slug}-{found[slug]}"] = 0
    return set(found)


def broken(page: str, root: Path = ROOT) -> list[str]:
    """The links of a page that lead nowhere."""
    text, wrong = text_of(page, root), []
    for link in SITE.links(text):
        goal = SITE.resolved(page, link.target)
        if goal is None:
            continue
        path, anchor = goal
        if not (root / path).exists():
            wrong.append(f"line {link.line}: no file {path}")
        elif anchor and path.endswith(".md") and anchor not in anchors((root / path).read_text(encoding="utf-8")):
            wrong.append(f"line {link.line}: no heading {anchor} in {path}")
    return wrong


def text_of(page: str, root: Path = ROOT) -> str:
    """The Markdown of a page; of a notebook that of its cells."""
    text = (root / page).read_text(encoding="utf-8")
    if page not in NOTEBOOKS:
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    assert broken(page) == []


def tracked() -> set[str]:
    """Files of the repository and their folders, as a code host shows them."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and its repository")
    files = [Path(name) for name in listed.split("\0") if name]
    return {each.as_posix() for file in files for each in (file, *file.parents)}


def test_a_code_host_has_what_is_linked():
    known = tracked()
    goals = {(page, SITE.resolved(page, link.target)) for page in PAGES for link in SITE.links(text_of(page))}
    assert {(page, goal[0]) for page, goal in goals if goal is not None and goal[0] not in known} == set()


def test_the_site_has_what_its_pages_link_to():
    pages = {SITE.site_path(page) for page in (*PAGES, *SITE.GENERATED)}
    for page in PAGES:
        place = SITE.site_path(page)
        for link in SITE.links(SITE.relinked(text_of(page), page, None)):
            # resolved as if the site's folder were the repository
            goal = SITE.resolved(place, link.target)
            if goal is not None:
                path = goal[0]
                is_file = (ROOT / "docs" / path).is_file() or (path.endswith(".png") and (ROOT / path).is_file())
                assert path in pages or is_file, (page, link.target)


def test_the_reference_says_where_the_docstrings_are():
    for path in (ROOT / "docs/reference").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        goals = [SITE.resolved(f"docs/reference/{path.name}", link.target)[0] for link in SITE.links(text)]
        assert "In the repository they stand in" in text
        assert any(goal.endswith(".py") for goal in goals), path.name


def test_the_reference_has_every_public_name():
    listed = set(
        re.findall(r"^::: ([\w.]+)$", "".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md")), re.MULTILINE)
    )
    names = {f"flexmask.{name}" for name in flexmask.__all__}
    names |= {f"flexmask.integrations.huggingface.{name}" for name in flexmask_hf.__all__}
    # a function of the same name as its module
    assert {name for name in names if name not in listed and f"{name}.{name.rpartition('.')[2]}" not in listed} == set()


def test_the_site_finds_names_that_are_imported_on_first_use():
    # it inspects modules, as help() does
    for module in (flexmask, flexmask_hf):
        assert set(module.__all__) <= set(dir(module))


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", navigation, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == {SITE.site_path(page) for page in (*PAGES, *SITE.GENERATED)}


def test_broken_links_are_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/other.md").write_text("# One thing\n\n## `code` & more\n\n## One thing\n\n```\n# no heading\n```\n")
    (tmp_path / "docs/page.md").write_text(
        "# Title\n\n[a](other.md#one-thing) [b](other.md#one-thing-1) [c](other.md#code--more) [d](#title) [e](https://example.org)\n"
        "`[f](nowhere.md)` is code\n\n```\n[g](nowhere.md)\n```\n"
        "[h](nowhere.md)\n[i](other.md#no-heading)\n[![j](nowhere.png)](other.md)\n"
    )
    assert broken("docs/page.md", tmp_path) == [
        "line 9: no file docs/nowhere.md",
        "line 10: no heading no-heading in docs/other.md",
        "line 11: no file docs/nowhere.png",
    ]


def test_badges_name_the_versions():
    project = (ROOT / "pyproject.toml").read_text()
    pins = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    newer = dict(re.findall(r'releases\("(\w+)".*newer=\("(\d+\.\d+)', (ROOT / "noxfile.py").read_text()))
    least = {name: re.search(rf"{name}>=([\d.]+)", project) for name in ("torch", "transformers")}
    for name, found in least.items():
        assert found is not None
        assert f"{name}: {found[1]} to {newer.get(name, pins[name])}<" in (ROOT / f"docs/badges/{name}.svg").read_text()
    python = re.search(r'requires-python = ">=([\d.]+)"', project)
    assert python is not None and f"python: {python[1]}+<" in (ROOT / "docs/badges/python.svg").read_text()
