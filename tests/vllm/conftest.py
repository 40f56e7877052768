"""Engines that several tests compare, each run once."""

import pytest


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Run a program of this folder once per session; gives what it wrote."""
    pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")
    from tests.serving.programs import written_by
    from tests.vllm.engines import ENVIRONMENT

    run_once = written_by(tmp_path_factory.mktemp("engines"), ENVIRONMENT)

    def run(program, *words):
        found = run_once(f"vllm.{program}", *words)
        assert found["status"] == 0, found["log"][-4000:]
        return found

    return run


@pytest.fixture
def run(written):
    """Give what an engine of `engine_run` wrote, by its name."""
    return lambda name: written("engine_run", name)
