"""The version matrix: the tests on several releases of torch, and those of the adapter on several of transformers.

The promises are ``torch>=2.5`` and ``transformers>=4.54,<5.25``. The sessions are the oldest release of each, some before a
change that matters here (torch 2.9: the signatures of BlockMask and flex_attention; transformers 5.0: caches and mask functions,
5.4: the arguments of mask functions), the ones that constraints.txt pins, and the newest. ``RELEASE`` tries
another one::

    nox                                       # all; or make test-versions
    nox -l
    nox -s "torch(2.5.1)" -- -x -k lists
    RELEASE=5.25.0 nox -s transformers

An environment is made once and kept. On Linux pip takes CUDA builds of torch unless it is told of an index with others: 5 to 7
GB each with their dependencies; they run on a CPU as well.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nox

nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "venv"

PINS = {
    re.split(r"[=<>~; ]", line, maxsplit=1)[0]: line
    for line in Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}
# the tests also need these, at the pinned versions
NEEDS = {"torch": ("hypothesis", "numpy", "pytest"), "transformers": ("accelerate", "hypothesis", "numpy", "pytest", "torch")}
# Not about torch's version, or in need of more packages. Kernels are interpreted by triton, whose release is its own matter.
NOT_ABOUT_TORCH = (
    "tests/integrations",
    "tests/kernels",
    "tests/test_documents.py",
    "tests/test_imports.py",
    "tests/test_plot.py",
    "tests/test_release.py",
    "tests/test_wheel.py",
)


def pinned(package: str) -> str:
    """The release that constraints.txt pins."""
    return PINS[package].partition(";")[0].partition("==")[2].strip()


def releases(package: str, *older: str, newer: tuple[str, ...] = ()) -> list[str]:
    """The releases of a session: the one in the environment, else the older ones, the pinned one and the newer ones."""
    named = os.environ.get("RELEASE")
    return [named] if named else [*older, pinned(package), *newer]


def run_tests(session: nox.Session, package: str, release: str, chosen: list[str]) -> None:
    """Install a release with what the tests need, and run the chosen tests on a CPU."""
    constraints = Path(session.create_tmp()) / "constraints.txt"
    lines = [f"{package}=={release}", *(PINS[name] for name in NEEDS[package])]
    constraints.write_text("\n".join(lines) + "\n", encoding="utf-8")
    session.install("-c", str(constraints), package, *NEEDS[package])
    surroundings = {"CUDA_VISIBLE_DEVICES": ""}
    options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", "-m", "not slow"]
    if release != pinned(package):
        options += ["-W", "default"]  # releases warn about packages of another age; that is not ours to repair
        if package == "torch":
            # torch 2.8.0 writes C++ with an open brace for flex_attention on more than one thread, which no compiler takes
            surroundings["OMP_NUM_THREADS"] = "1"
    session.run("python", "-m", "pytest", *options, *chosen, *session.posargs, env=surroundings)


TORCH = releases("torch", "2.5.1", "2.8.0", newer=("2.15.0",))
TRANSFORMERS = releases("transformers", "4.54.1", "4.57.6", "5.0.0", newer=("5.24.0",))


@nox.session
@nox.parametrize("release", TORCH, ids=TORCH)
def torch(session: nox.Session, release: str) -> None:
    """The tests of the core on a release of torch."""
    chosen = ["tests", *(f"--ignore={path}" for path in NOT_ABOUT_TORCH)]
    if release.startswith("2.5."):
        chosen += ["-m", "not slow and not attention"]  # FlexAttention runs on CPUs from 2.6 on
    run_tests(session, "torch", release, chosen)


@nox.session
@nox.parametrize("release", TRANSFORMERS, ids=TRANSFORMERS)
def transformers(session: nox.Session, release: str) -> None:
    """The adapter's tests on a release of transformers, with the pinned torch."""
    run_tests(session, "transformers", release, ["tests/integrations"])


@nox.session(default=False)
@nox.parametrize("release", ["0.32.0", "0.33.0"], ids=["0.32.0", "0.33.0"])
def vllm(session: nox.Session, release: str) -> None:
    """The plug-in's tests on a release of vLLM's CPU build, 3.4 GB each; all but its HTTP server."""
    session.run("sh", "tests/vllm/environment.sh", session.virtualenv.location, "python3", release, external=True)
    options = ["-o", "filterwarnings=default", "-m", "not slow", "--ignore=tests/vllm/test_server.py"]
    session.run("python", "-m", "pytest", *options, "tests/vllm", *session.posargs, env={"OMP_NUM_THREADS": "1"})
