"""The side folders: imported by their full names only, reached through symlinks, and installed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.repository import ROOT, SIDE_FOLDERS


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
