"""Engines that several tests compare, each run once, and a builder and an implementation without an engine."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch


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


@pytest.fixture
def config(monkeypatch):
    """A vLLM config with the plug-in's options, which the plug-in finds."""
    from tests.vllm.configs import config_of

    made = config_of({"gamma": 1.0, "block_size": 32, "dense_below": 0})
    monkeypatch.setattr("flexmask.integrations.vllm.impl.get_current_vllm_config", lambda: made)
    monkeypatch.setattr("flexmask.integrations.vllm.engine._tensor_parallel_rank", lambda: (0, 1))
    return made


@pytest.fixture
def engine(config):
    """The plug-in's engine of `config`."""
    from flexmask.integrations.vllm.engine import engine_of

    made = engine_of(config)
    made.prepare, made.calling_layers = Mock(), lambda: (SimpleNamespace,)
    return made


@pytest.fixture
def parts(config, engine):
    """A builder and an implementation over the stock ones of `stock_steps`."""
    from tests.vllm.stock_steps import LAYER, Builder, impl_of

    impl = impl_of(engine, lookback=-1, indexer=None)
    return Builder(None, [LAYER.layer_name], config, torch.device("cpu")), impl
