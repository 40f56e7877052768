"""Run the tests on several releases of torch and of transformers, each in an environment of its own beside this checkout.

The promises are ``torch>=2.5`` and ``transformers>=4.54``. By default this runs the oldest release of each, some before a change
that matters here (torch 2.9: the signatures of BlockMask and flex_attention; transformers 5.0: caches and mask functions, 5.4:
the arguments of mask functions), and the ones that constraints.txt pins. Releases that came out later are tried by name::

    make test-versions
    make test-versions ARGS="--torch 2.15.0"
    make test-versions ARGS="--transformers 4.54.1 5.24.0"
    make test-versions ARGS="--torch 2.5.1 --pytest '-x -k emit'"

Every environment, ``.venv-torch<release>`` or ``.venv-transformers<release>``, is made once and kept. Builds of torch for CUDA,
which pip takes on Linux unless it is told of an index with others, are 5 to 7 GB each with what they need; they run on a CPU as
well. Of transformers only the tests of its adapter are run, on the pinned torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"

# and the pinned ones
RELEASES = {"torch": ("2.5.1", "2.8.0"), "transformers": ("4.54.1", "4.57.6", "5.0.0")}

# What the tests need besides, at the pinned versions.
PACKAGES = {
    "torch": ("hypothesis", "numpy", "pytest"),
    "transformers": ("accelerate", "hypothesis", "numpy", "pytest", "torch"),
}

# Tests marked `attention` need FlexAttention on a CPU, which torch has from this release on.
ATTENTION_SINCE = (2, 6)

# Not about torch's version, or in need of more packages. Kernels are interpreted by triton, whose release is its own matter.
OTHER_TESTS = (
    "tests/integrations",
    "tests/test_demo.py",
    "tests/kernels/test_search.py",
    "tests/test_import_effects.py",
    "tests/test_imports.py",
    "tests/test_plot.py",
    "tests/test_readme.py",
    "tests/test_side_folders.py",
    "tests/test_triton_kernels.py",
)

GIGABYTES_EACH = 8


def pinned(names: Sequence[str]) -> list[str]:
    """The lines of constraints.txt for `names`."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if re.split(r"[=<>~; ]", line, maxsplit=1)[0] in names]


def pinned_release(package: str) -> str:
    """The release that constraints.txt pins."""
    (line,) = pinned([package])
    return line.partition(";")[0].partition("==")[2].strip()


def release_numbers(release: str) -> tuple[int, ...]:
    """The numbers of a release, to compare.

    >>> release_numbers("2.13.0+cpu") > release_numbers("2.6")
    True
    """
    return tuple(int(number) for number in re.findall(r"\d+", release.partition("+")[0])[:3])


def environment(package: str, release: str, python: str) -> Path:
    """The interpreter of the environment for a release of `package`, which is made if it is not there or not whole."""
    folder = ROOT / f".venv-{package}{release}"
    interpreter = folder / "bin" / "python"
    wanted = "\n".join([f"{package}=={release}", *pinned(PACKAGES[package])])
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return interpreter
    free = shutil.disk_usage(ROOT).free / 1e9
    if not folder.exists() and free < GIGABYTES_EACH:
        raise OSError(f"{folder.name} may need {GIGABYTES_EACH} GB; {free:.0f} GB are free")
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(wanted + "\n", encoding="utf-8")
    pip = [str(interpreter), "-m", "pip", "--disable-pip-version-check", "install", "-c", str(constraints)]
    subprocess.run([*pip, f"{package}=={release}", *PACKAGES[package]], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return interpreter


def chosen_tests(package: str, release: str) -> list[str]:
    """Which tests run on a release of `package`, as arguments of pytest."""
    if package == "transformers":
        return ["tests/integrations"]
    chosen = ["tests", *(f"--ignore={path}" for path in OTHER_TESTS)]
    return chosen if release_numbers(release) >= ATTENTION_SINCE else [*chosen, "-m", "not attention"]


def run_tests(package: str, release: str, python: str, options: Sequence[str]) -> int:
    """Pytest's exit code on a release of `package`."""
    interpreter = environment(package, release, python)
    command = [
        str(interpreter),
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        *chosen_tests(package, release),
        *options,
    ]
    surroundings = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    if release != pinned_release(package):
        # older releases warn about newer Python and packages; that is not ours to repair
        command += ["-W", "default"]
    if package == "torch" and release != pinned_release(package):
        # torch 2.8.0 writes C++ with an open brace for flex_attention on more than one thread, which no compiler takes
        surroundings["OMP_NUM_THREADS"] = "1"
    return subprocess.run(command, cwd=ROOT, env=surroundings, check=False).returncode


def main() -> int:
    """Every release in turn; a release that fails does not stop the others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for package in RELEASES:
        parser.add_argument(f"--{package}", nargs="+", metavar="RELEASE", help="these releases; without: the usual ones of both")
    parser.add_argument("--python", default=sys.executable, help="interpreter to make the environments with")
    parser.add_argument("--pytest", default="", metavar="OPTIONS", help="more options for pytest, in one word")
    arguments = parser.parse_args()

    chosen = {package: getattr(arguments, package) for package in RELEASES if getattr(arguments, package)}
    chosen = chosen or {package: [*releases, pinned_release(package)] for package, releases in RELEASES.items()}

    results = {}
    for package, release in ((package, release) for package, releases in chosen.items() for release in releases):
        print(f"== {package} {release}", flush=True)
        start = time.monotonic()
        try:
            code = run_tests(package, release, arguments.python, shlex.split(arguments.pytest))
            result = "passed" if code == 0 else f"failed (pytest's exit code {code})"
        except (OSError, subprocess.CalledProcessError) as error:
            result = f"could not run: {error}"
        results[f"{package} {release}"] = f"{result}, {time.monotonic() - start:.0f} s"
    print("\n".join(f"{name}: {result}" for name, result in results.items()))
    return 0 if all(result.startswith("passed") for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
