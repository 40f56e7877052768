"""Notebooks run from first to last cell and become pages of the site."""

import json
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from tests.repository import ROOT, module_of
from tests.test_documents import NOTEBOOKS, import_ours
from tests.test_documents import folder as folder

ON_GPU = "docs/notebooks/gpu.ipynb"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a short prompt runs dense, and the adapter says so
notebook = module_of(ROOT / "docs/notebook.py")


@pytest.fixture
def run(folder, monkeypatch):
    """Run the code of a notebook; gives its cells of code."""
    import matplotlib.pyplot as plt

    (folder / "docs/notebooks").mkdir(parents=True)
    monkeypatch.chdir(folder / "docs/notebooks")
    path = list(sys.path)
    plt.switch_backend("agg")
    plt.close("all")  # of other tests

    def run(found):
        cells = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
        for cell in cells:
            cell["outputs"] = []
        notebook.run(found)
        return cells

    yield run
    sys.path[:] = path
    plt.close("all")


def test_cells_share_names_and_keep_what_they_print_and_draw(run):
    sources = ["number = 3", "import matplotlib.pyplot as plt\nplt.figure()\nprint(number)\nnumber += 1", "print(number)"]
    found = {"cells": [{"cell_type": "code", "source": source} for source in sources]}
    cells = run(found)
    assert [notebook.printed(cell) for cell in cells] == ["", "3\n", "4\n"]
    assert [len(notebook.pictures(cell)) for cell in cells] == [0, 1, 0]
    text, pictures = notebook.page(json.loads(json.dumps(found)), "name")
    assert "```text\n3\n```\n\n![Drawn by the code above](name-1.png)" in text
    assert pictures == {"name-1.png": notebook.pictures(cells[1])[0]}


@pytest.mark.gpu
def test_the_notebook_for_a_gpu_runs(run):
    assert sum(len(notebook.pictures(cell)) for cell in run(notebook.load(ROOT / ON_GPU))) == 2


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_imports_of_notebooks_exist(name):
    for _, source in notebook.code_cells(notebook.load(ROOT / name)):
        import_ours(source)
