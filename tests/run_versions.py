"""Run the tests on several releases of torch, each in an environment of its own beside this checkout.

The promise is ``torch>=2.5``. By default this runs the oldest release of that, the last one before BlockMask and flex_attention
changed their signatures (2.9), and the one that constraints.txt pins. Releases that came out later are tried by name::

    make test-versions
    make test-versions ARGS="--torch 2.15.0"
    make test-versions ARGS="--torch 2.5.1 --pytest '-x -k emit'"

Every environment, ``.venv-torch<release>``, is made once and kept. Builds of torch for CUDA, which pip takes on Linux unless it
is told of an index with others, are 5 to 7 GB each with what they need; they run on a CPU as well.
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

RELEASES = ("2.5.1", "2.8.0")  # and the pinned one

# What the tests of masks and of attention need besides torch; at the pinned versions.
PACKAGES = ("hypothesis", "numpy", "pytest")

# Tests marked `attention` need FlexAttention on a CPU, which torch has from this release on.
ATTENTION_SINCE = (2, 6)

# Not about torch's version, or in need of more packages. Kernels are interpreted by triton, whose release is its own matter.
OTHER_TESTS = (
    "tests/integrations",
    "tests/test_demo.py",
    "tests/test_fused_search.py",
    "tests/test_imports.py",
    "tests/test_plot.py",
    "tests/test_readme.py",
    "tests/test_triton_kernels.py",
)

GIGABYTES_EACH = 8


def pinned(names: Sequence[str]) -> list[str]:
    """The lines of constraints.txt for `names`."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if re.split(r"[=<>~; ]", line, maxsplit=1)[0] in names]


def pinned_torch() -> str:
    """The release that constraints.txt pins."""
    (line,) = pinned(["torch"])
    return line.partition("==")[2].strip()


def release_numbers(release: str) -> tuple[int, ...]:
    """The numbers of a release, to compare.

    >>> release_numbers("2.13.0+cpu") > release_numbers("2.6")
    True
    """
    return tuple(int(number) for number in re.findall(r"\d+", release.partition("+")[0])[:3])


def environment(release: str, python: str) -> Path:
    """The interpreter of the environment for `release`, which is made if it is not there or not whole."""
    folder = ROOT / f".venv-torch{release}"
    interpreter = folder / "bin" / "python"
    wanted = "\n".join([f"torch=={release}", *pinned(PACKAGES)])
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
    subprocess.run([*pip, f"torch=={release}", *PACKAGES], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return interpreter


def chosen_tests(release: str) -> list[str]:
    """Which tests run on `release`, as arguments of pytest."""
    chosen = ["tests", *(f"--ignore={path}" for path in OTHER_TESTS)]
    return chosen if release_numbers(release) >= ATTENTION_SINCE else [*chosen, "-m", "not attention"]


def run_tests(release: str, python: str, options: Sequence[str]) -> int:
    """Pytest's exit code on `release`."""
    interpreter = environment(release, python)
    command = [
        str(interpreter),
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        *chosen_tests(release),
        *options,
    ]
    surroundings = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    if release != pinned_torch():
        # an older torch warns about newer Python and packages; that is not ours to repair
        command += ["-W", "default"]
        # torch 2.8.0 writes C++ with an open brace for flex_attention on more than one thread, which no compiler takes
        surroundings["OMP_NUM_THREADS"] = "1"
    return subprocess.run(command, cwd=ROOT, env=surroundings, check=False).returncode


def main() -> int:
    """Every release in turn; a release that fails does not stop the others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch", nargs="+", metavar="RELEASE", default=[*RELEASES, pinned_torch()])
    parser.add_argument("--python", default=sys.executable, help="interpreter to make the environments with")
    parser.add_argument("--pytest", default="", metavar="OPTIONS", help="more options for pytest, in one word")
    arguments = parser.parse_args()

    results = {}
    for release in arguments.torch:
        print(f"== torch {release}", flush=True)
        start = time.monotonic()
        try:
            code = run_tests(release, arguments.python, shlex.split(arguments.pytest))
            result = "passed" if code == 0 else f"failed (pytest's exit code {code})"
        except (OSError, subprocess.CalledProcessError) as error:
            result = f"could not run: {error}"
        results[release] = f"{result}, {time.monotonic() - start:.0f} s"
    print("\n".join(f"torch {release}: {result}" for release, result in results.items()))
    return 0 if all(result.startswith("passed") for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
