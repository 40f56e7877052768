"""Engines that several tests compare, each run once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Run a program of this folder once per session; gives what it wrote.

    FLEXMASK_VLLM_ANSWERS names a folder with answers of engines on a GPU.
    """
    pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")
    from tests.vllm.engines import ENVIRONMENT

    # an engine may stand on the path too
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    folder, made = tmp_path_factory.mktemp("engines"), {}

    def run(program, *arguments):
        named = (program, *arguments)
        before = os.environ.get("FLEXMASK_VLLM_ANSWERS")
        if before and "cuda" in arguments:
            name = "_".join(arguments[:1] if program == "engine_run" else ("adapter", *arguments[1:]))
            return json.loads((Path(before) / f"{name}.json").read_text(encoding="utf-8"))
        if named not in made:
            out = folder / f"{'-'.join(named)}.json"
            log = out.with_suffix(".log")
            with log.open("wb") as stream:
                done = subprocess.run(
                    [sys.executable, "-m", f"tests.vllm.{program}", *arguments, str(out)],
                    cwd=ROOT,
                    env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            text = log.read_text(encoding="utf-8", errors="replace")
            assert done.returncode == 0, text[-4000:]
            made[named] = {**json.loads(out.read_text(encoding="utf-8")), "log": text}
        return made[named]

    return run
