"""Every kernel compiles, and fits into shared memory, for GPUs that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

pytest.importorskip("triton")

# bytes of shared memory per program
LIMITS = {
    "sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_120": 101_376, "gfx942": 65_536,
    "gfx1100": 65_536,
}  # fmt: skip


def printed(tmp_path: Path, program: str, *arguments: str) -> str:
    """Output of a program of this folder, run without Triton's interpreter."""
    surroundings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    surroundings |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"tests.kernels.{program}", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=surroundings, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def compiled(tmp_path: Path, which: str, *targets: str) -> set[str]:
    """Names of the compiled kernels, none of which failed or took too much memory."""
    lines = printed(tmp_path, "compile_kernels", which, *targets).splitlines()
    results = [json.loads(line.removeprefix("compiled ")) for line in lines if line.startswith("compiled ")]
    assert {result["target"] for result in results} == set(targets)
    for result in results:
        assert result["error"] is None, result
        assert result["shared"] <= LIMITS[result["target"]], result
    return {result["kernel"] for result in results}


# gfx942 has the memory of gfx1100
@pytest.mark.parametrize("target", ["sm_86", pytest.param("gfx942", marks=pytest.mark.slow), "gfx1100"])
def test_tiles_of_keys_fit_into_the_least_shared_memory(target, tmp_path):
    assert compiled(tmp_path, "tight", target) == {"_block_sums_kernel", "_pooled_map_kernel", "_evidence_kernel"}


@pytest.mark.slow
def test_tiles_of_wide_heads_fit_into_the_least_shared_memory_of_nvidia(tmp_path):
    assert len(compiled(tmp_path, "wide", "sm_86")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("target", LIMITS)
def test_every_kernel_compiles(target, tmp_path):
    assert len(compiled(tmp_path, "choice", target)) == 19
