"""Every kernel compiles, and fits into shared memory, for GPUs that need not be there."""

import json
from pathlib import Path

import pytest

from tests.repository import python

pytest.importorskip("triton")

# bytes of shared memory per program
LIMITS = {
    "sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_120": 101_376, "gfx942": 65_536,
    "gfx1100": 65_536,
}  # fmt: skip


def compiled(tmp_path: Path, which: str, target: str) -> set[str]:
    """Names of the compiled kernels, none of which failed or took too much memory; without Triton's interpreter."""
    command = ("-m", "tests.kernels.compile_kernels", which, target)
    results = json.loads(python(*command, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)).splitlines()[-1])
    for kernel, shared, problem in results:
        assert shared <= LIMITS[target], (kernel, problem)
    return {kernel for kernel, *_ in results}


SLOW = (("tight", "gfx1100"), ("tight", "gfx942"), ("wide", "sm_86"))  # gfx942 has the memory of gfx1100


@pytest.mark.parametrize(
    ("which", "target"),
    [("tight", "sm_86"), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_tiles_of_keys_fit_into_the_least_shared_memory(which, target, tmp_path):
    assert compiled(tmp_path, which, target) == {"_block_sums_kernel", "_pooled_map_kernel", "_evidence_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("target", LIMITS)
def test_every_kernel_compiles(target, tmp_path):
    assert len(compiled(tmp_path, "choice", target)) == 21
