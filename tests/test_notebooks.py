"""The notebooks run from first to last cell and become pages of the site."""

import json
import os
import sys

import pytest
import torch
import torch._dynamo

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from tests.repository import ROOT, module_of
from tests.test_documents import differences, missing_imports

FOLDER = ROOT / "docs/notebooks"
ON_CPU, ON_GPU = "tuning.ipynb", "gpu.ipynb"


notebook = module_of(ROOT / "docs/notebook.py")


def load(name, *changes):
    """A notebook without its output, with pairs of texts replaced in its code."""
    found = notebook.load(FOLDER / name)
    for at, source in notebook.code_cells(found):
        for old, new in changes:
            source = source.replace(old, new)
        found["cells"][at] |= {"source": source.splitlines(keepends=True), "outputs": []}
    return found


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with bench/ to run in; everything is as before afterwards."""
    import matplotlib.pyplot as plt

    (tmp_path / "bench").symlink_to(ROOT / "bench")
    (tmp_path / "docs/notebooks").mkdir(parents=True)
    path = list(sys.path)
    monkeypatch.chdir(tmp_path / "docs/notebooks")
    plt.switch_backend("agg")
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
        yield tmp_path
    sys.path[:] = path
    plt.close("all")
    torch._dynamo.reset()


@pytest.mark.attention
@pytest.mark.filterwarnings("ignore::UserWarning")  # a short prompt runs dense, and the adapter says so
def test_the_notebook_for_a_cpu_runs(checkout):
    found = load(ON_CPU, ("TOKENS = 8192", "TOKENS = 2048"), ("progress=False", "progress=False, gammas=(0.6, 0.9, 1.0)"))
    names = notebook.run(found)
    assert names["TOKENS"] == 2048 and os.path.samefile(os.getcwd(), checkout)
    drawn = [cell for cell in found["cells"] if cell["cell_type"] == "code" and notebook.pictures(cell)]
    assert len(drawn) == 4
    config = json.loads((checkout / "out/tuned-retriever/config.json").read_text())
    tuned = names["result"].settings.layers
    assert [tuple(config["flexmask_config"]["layers"][str(layer)]["gamma"]) for layer in range(4)] == [
        tuned[layer]["gamma"] for layer in range(4)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_notebook_for_a_cpu_prints_what_is_stored(checkout):
    stored, found = notebook.load(FOLDER / ON_CPU), load(ON_CPU)
    notebook.run(found)
    for at, _ in notebook.code_cells(found):
        before, after = stored["cells"][at], found["cells"][at]
        assert differences(notebook.printed(before), notebook.printed(after)) == [], f"cell {at + 1}"
        assert len(notebook.pictures(before)) == len(notebook.pictures(after)), f"cell {at + 1}"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_notebook_for_a_gpu_runs(checkout):
    found = load(ON_GPU)
    notebook.run(found)
    assert sum(len(notebook.pictures(cell)) for cell in found["cells"] if cell["cell_type"] == "code") == 3


@pytest.mark.parametrize("name", [ON_CPU, ON_GPU])
def test_imports_of_notebooks_exist(name):
    for at, source in notebook.code_cells(notebook.load(FOLDER / name)):
        assert missing_imports(source) == [], f"cell {at + 1}"
