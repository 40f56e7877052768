"""Hook of MkDocs: adds the pages outside of docs/ and turns links between files of the repository into links between pages.

docs/ is the site's root; other pages keep their paths. A link to a file without a page leads to the repository if mkdocs.yml has
a `repo_url`, and otherwise becomes plain text.
"""

from __future__ import annotations

import importlib
import importlib.util
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# pages outside of docs/, from the repository's root; README.md is the site's home
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    "bench/FIDELITY.md",
    # of earlier rules and engines: linked, but not in the navigation
    "bench/archive/EARLIER.md",
    "bench/archive/earlier-rule.md",
    "bench/archive/engines.md",
    "bench/archive/kernels.md",
    "bench/HYBRID_ABLATIONS.md",
    "bench/LEADERBOARD.md",
    "bench/README.md",
    "bench/REPORT.md",
    "bench/RULER.md",
    "bench/results/README.md",
    "bench/retriever/README.md",
    "bench/ruler_model/README.md",
    "block_masks/README.md",
    "integrations/huggingface/MODELS.md",
    "integrations/README.md",
    "integrations/huggingface/SUPPORT.md",
    "tests/README.md",
)
# pages that the site writes from bench/results/, each with its module and function; git ignores them
GENERATED = {
    "bench/SERVING.md": ("bench.serving.table", "report"),
}
_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
# code first: a link inside of code is none
_LINK = re.compile(r"(?P<code>`[^`\n]*`)|(?P<image>!?)\[(?P<text>(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^()\s]+)\)")
_OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


class Link(NamedTuple):
    """A link of a page: its text, target as written, and line."""

    text: str
    target: str
    line: int
    is_image: bool


def site_path(path: str) -> str | None:
    """Path in the site of a file of the repository; None without a page."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return None if path.endswith(".py") else path.removeprefix("docs/").replace(".ipynb", ".md")
    return path if path in (*PAGES, *GENERATED) or path.endswith(".png") else None


def links(markdown: str) -> Iterator[Link]:
    """Links and pictures outside of code, also pictures inside of links."""
    for start, text in _prose(markdown):
        for found in _LINK.finditer(text):
            if found["code"]:
                continue
            line = markdown.count("\n", 0, start + found.start()) + 1
            yield Link(found["text"], found["target"], line, bool(found["image"]))
            yield from (inner._replace(line=line) for inner in links(found["text"]) if not found["image"])


def resolved(page: str, target: str) -> tuple[str, str] | None:
    """File and anchor that a link of `page` leads to; None for network addresses."""
    if _OUTSIDE.match(target):
        return None
    path, _, anchor = target.partition("#")
    return (posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page), anchor


def relinked(markdown: str, page: str, repo_url: str | None) -> str:
    """The text of `page` with the site's links."""

    def link(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        text = found["text"] if found["image"] else _LINK.sub(link, found["text"])
        goal = resolved(page, found["target"])
        if goal is None:
            return f"{found['image']}[{text}]({found['target']})"
        path, anchor = goal
        place = site_path(path)
        if place is None:
            if repo_url is None:
                return text
            return f"[{text}]({repo_url.rstrip('/')}/blob/main/{path})"
        here = site_path(page)
        assert here is not None
        target = posixpath.relpath(place, posixpath.dirname(here) or ".") if path != page else ""
        return f"{found['image']}[{text}]({target}{'#' + anchor if anchor else ''})"

    return _over_prose(markdown, lambda text: _LINK.sub(link, text))


def _prose(markdown: str) -> Iterator[tuple[int, str]]:
    """The parts outside of fenced code, with their offsets."""
    end = 0
    for fence in _FENCE.finditer(markdown):
        yield end, markdown[end : fence.start()]
        end = fence.end()
    yield end, markdown[end:]


def _over_prose(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for start, text in _prose(markdown):
        parts += [markdown[end:start], change(text)]
        end = start + len(text)
    return "".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and the pages and pictures outside of docs/."""
    from mkdocs.structure.files import File

    for page, (module, function) in GENERATED.items():
        text = getattr(importlib.import_module(module), function)(ROOT / "bench/results")
        files.append(File.generated(config, page, content=relinked(text, page, config.repo_url)))
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        files.append(File.generated(config, site_path(page), content=relinked(text, page, config.repo_url)))
    for picture in sorted({*pictures()} - {file.src_uri for file in files}):
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    for place, content in notebooks(config.repo_url):
        files.append(File.generated(config, place, content=content))
    return files


def pictures() -> Iterator[str]:
    """The pictures outside of docs/ that pages show."""
    in_docs = (path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    for page in (*PAGES, *in_docs):
        for link in links((ROOT / page).read_text(encoding="utf-8")):
            goal = resolved(page, link.target)
            if goal and goal[0].endswith(".png") and not goal[0].startswith("docs/"):
                yield goal[0]


def notebooks(repo_url: str | None) -> Iterator[tuple[str, str | bytes]]:
    """The notebooks as pages, and their pictures, each with its path in the site."""
    read = _module("notebook")
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        text, pictures = read.page(read.load(path), path.stem)
        source = path.relative_to(ROOT).as_posix()
        title, rest = relinked(text, source, repo_url).split("\n", 1)
        place = site_path(source)
        assert place is not None
        yield place, f"{title}\n\n*This page is [a notebook]({path.name}) that Jupyter runs.*\n{rest}"
        yield from ((f"notebooks/{name}", picture) for name, picture in pictures.items())


def _module(name: str) -> Any:
    """Load a module of this folder, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Relink the pages of docs/; hide the table of contents of pages without sections."""
    if not re.search(r"^##+ ", markdown, re.MULTILINE):
        page.meta.setdefault("hide", ["toc"])
    if page.file.generated_by:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", config.repo_url)
