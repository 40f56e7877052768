"""The notebooks run from first to last cell and become pages of the site."""

import json
import os
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from tests.repository import ROOT, module_of
from tests.test_documents import NOTEBOOKS, differences, import_ours
from tests.test_documents import folder as folder

ON_CPU, ON_GPU = "docs/notebooks/tuning.ipynb", "docs/notebooks/gpu.ipynb"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a short prompt runs dense, and the adapter says so
notebook = module_of(ROOT / "docs/notebook.py")


@pytest.fixture
def run(folder, monkeypatch):
    """Run a notebook with pairs of texts replaced; gives its cells of code and its names."""
    import matplotlib.pyplot as plt

    (folder / "docs/notebooks").mkdir(parents=True)
    monkeypatch.chdir(folder / "docs/notebooks")
    path = list(sys.path)
    plt.switch_backend("agg")

    def run(name, *changes):
        text = (ROOT / name).read_text(encoding="utf-8")
        for old, new in changes:
            text = text.replace(old, new)
        found = json.loads(text)
        cells = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
        for cell in cells:
            cell["outputs"] = []
        return cells, notebook.run(found)

    yield run
    sys.path[:] = path
    plt.close("all")


@pytest.mark.attention
def test_the_notebook_for_a_cpu_runs(folder, run):
    cells, names = run(ON_CPU, ("TOKENS = 8192", "TOKENS = 2048"), ("progress=False", "progress=False, gammas=(0.6, 0.9, 1.0)"))
    assert names["TOKENS"] == 2048 and os.path.samefile(os.getcwd(), folder)
    assert sum(map(bool, map(notebook.pictures, cells))) == 4
    config = json.loads((folder / "out/tuned-retriever/config.json").read_text())
    tuned = names["result"].settings.layers
    for layer in range(4):
        assert tuple(config["flexmask_config"]["layers"][str(layer)]["gamma"]) == tuned[layer]["gamma"]


@pytest.mark.slow
def test_the_notebook_for_a_cpu_prints_what_is_stored(run):
    stored = [cell for cell in notebook.load(ROOT / ON_CPU)["cells"] if cell["cell_type"] == "code"]
    for number, (before, after) in enumerate(zip(stored, run(ON_CPU)[0], strict=True), start=1):
        assert differences(notebook.printed(before), notebook.printed(after)) == [], f"cell {number} of code"
        assert len(notebook.pictures(before)) == len(notebook.pictures(after)), f"cell {number} of code"


@pytest.mark.gpu
def test_the_notebook_for_a_gpu_runs(run):
    assert sum(len(notebook.pictures(cell)) for cell in run(ON_GPU)[0]) == 3


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_imports_of_notebooks_exist(name):
    for _, source in notebook.code_cells(notebook.load(ROOT / name)):
        import_ours(source)
