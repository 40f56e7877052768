"""The place of SGLang's kernels on a CPU; engines that several tests compare."""

import importlib.util
import json
import os
import subprocess
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
    from tests.sglang.engine_run import ENVIRONMENT

    folder, made = tmp_path_factory.mktemp("engines"), {}

    def run(program, *arguments):
        named = (program, *arguments)
        if named not in made:
            out = folder / f"{'-'.join(named)}.json"
            log = out.with_suffix(".log")
            with log.open("wb") as stream:
                done = subprocess.run(
                    [sys.executable, "-W", "ignore", "-m", f"tests.{program}", *arguments, str(out)],
                    cwd=ROOT,
                    env={**os.environ, **ENVIRONMENT},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            text = log.read_text(encoding="utf-8", errors="replace")
            answers = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
            made[named] = {**answers, "log": text, "status": done.returncode}
        return made[named]

    return run


@pytest.fixture
def no_grad():
    import torch

    with torch.no_grad():
        yield
