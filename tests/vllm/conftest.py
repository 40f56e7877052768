"""Engines that several tests compare, each run once."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Run a program of this folder once per session; gives what it wrote.

    FLEXMASK_VLLM_ANSWERS names a folder with answers of engines on a GPU.
    """
    pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")
    from tests.serving.programs import written_by
    from tests.vllm.engines import ENVIRONMENT

    run_once = written_by(tmp_path_factory.mktemp("engines"), ENVIRONMENT)

    def run(program, *arguments):
        before = os.environ.get("FLEXMASK_VLLM_ANSWERS")
        if before and "cuda" in arguments:
            name = "_".join(arguments[:1] if program == "engine_run" else ("adapter", *arguments[1:]))
            return json.loads((Path(before) / f"{name}.json").read_text(encoding="utf-8"))
        found = run_once(f"vllm.{program}", *arguments)
        assert found["status"] == 0, found["log"][-4000:]
        return found

    return run
