"""The place of SGLang's kernels on a CPU; engines that several tests compare."""

import importlib.util
import os
import sys

import pytest

from tests.repository import ROOT

# before SGLang is imported
if importlib.util.find_spec("sglang") is not None and importlib.util.find_spec("sgl_kernel") is None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.path.insert(0, str(ROOT / "tests/sglang/names_only"))


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Run a program once per session; gives what it wrote, its log and its exit status."""
    pytest.importorskip("sglang", reason="`make test-sglang` has it in an environment of its own")
    from tests.serving.programs import written_by
    from tests.sglang.engine_run import ENVIRONMENT

    return written_by(tmp_path_factory.mktemp("engines"), ENVIRONMENT)
