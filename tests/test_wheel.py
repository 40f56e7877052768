"""Contents of wheel and sdist; the package works from the wheel alone.

They are built by the environment's setuptools, without a download. `make test-wheel` also installs the sdist into a clean
environment.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import flexmask
from tests.repository import ROOT, SIDE_FOLDERS, python

pytest.importorskip("setuptools", minversion="77", reason="builds with the environment's setuptools")

BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
USE = """
import importlib, pkgutil
import torch
import flexmask

assert all(getattr(flexmask, name) is not None for name in flexmask.__all__ if name != "sparse_prefill")
assert set(flexmask.METHODS) >= {"flexprefill", "hybrid", "streaming_llm"}
query, key = torch.randn(1, 4, 300, 32), torch.randn(1, 2, 300, 32)
mask = flexmask.flexprefill_mask(query, key, gamma=0.5, block_size=32, min_budget=0)
assert mask.shape == (1, 4, 300, 300) and 0 < mask.to_dense().float().mean() < 0.6
assert flexmask.sparse_attention_varlen(*[torch.randn(50, 2, 16)] * 3, [0, 20, 50]).shape == (50, 2, 16)
missing = {"transformers", "matplotlib", "triton", "typer", "rich", "vllm", "lm_eval", "sglang"}
for module in pkgutil.walk_packages(flexmask.__path__, "flexmask."):
    if module.name.endswith("__main__"):
        continue  # importing it runs the program
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] in missing, error
print(flexmask.__file__)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The files that a build reads, in a clean folder."""
    folder = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("flexmask", *SIDE_FOLDERS):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    weights = folder / "bench" / "ruler_model" / "model"  # neither kind of package may take them
    weights.mkdir(parents=True)
    (weights / "model.safetensors").write_bytes(b"weights")
    (weights.parent / "__init__.py").touch()
    return folder


def build(kind: str, source: Path, out: Path) -> Path:
    return out / python("-W", "ignore", "-c", BUILD, kind, str(out), path=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("build_wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    return build("build_sdist", source, tmp_path_factory.mktemp("sdist"))


def test_wheel_holds_the_package_and_names_its_requirements(source, wheel):
    expected = {"flexmask/py.typed"}
    for folder in ("flexmask", *SIDE_FOLDERS):
        for path in (source / folder).rglob("*.py"):
            relative = path.relative_to(source)
            if relative.parts[:2] in {("flexmask", side) for side in SIDE_FOLDERS}:
                continue  # the symlinks
            expected.add(relative.as_posix() if folder == "flexmask" else f"flexmask/{relative.as_posix()}")
    described = f"flexmask-{flexmask.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"{described}/METADATA").decode()
    assert {name for name in names if not name.startswith(described)} == expected
    assert f"{described}/licenses/LICENSE" in names
    needed = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert [each for each in needed if "extra ==" not in each] == ["numpy", "torch>=2.5"]


def test_sdist_holds_no_trained_model(sdist):
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(name.endswith("/flexmask/__init__.py") for name in names)
    assert not [name for name in names if "/bench" in name or name.endswith(".safetensors")]


def test_package_works_from_the_wheel_alone(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    found = python("-W", "ignore", "-c", USE, path=tmp_path).splitlines()[-1]
    assert Path(found).resolve().is_relative_to(tmp_path.resolve())


@pytest.mark.skipif("FLEXMASK_TEST_WHEEL" not in os.environ, reason="downloads; `make test-wheel` runs it")
def test_sdist_installs_into_a_clean_environment(sdist, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    executable = str(tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python")
    install = ["-m", "pip", "install", "--disable-pip-version-check", "-q", "-c", str(ROOT / "constraints.txt")]
    outside = tmp_path / "outside"
    outside.mkdir()
    python(*install, f"flexmask[cli] @ {sdist.as_uri()}", path=outside, executable=executable)
    found = python("-W", "ignore", "-c", USE, path=outside, executable=executable).splitlines()[-1]
    assert Path(found).resolve().is_relative_to((tmp_path / "venv").resolve())
    run = subprocess.run([Path(executable).with_name("flexmask"), "--help"], cwd=outside, capture_output=True, text=True)
    assert run.returncode == 0 and "Usage" in run.stdout, run.stderr
