"""The front end reads options of a request, and either model runner tells them to the engine."""

import gc
import weakref
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from flexmask.integrations.serving.options import RequestOptions
from flexmask.integrations.serving.split import StepSplit
from flexmask.integrations.vllm import engine as engine_module
from flexmask.integrations.vllm.engine import follow_requests
from flexmask.integrations.vllm.registration import encode_requests
from tests.vllm.configs import config_of


@pytest.fixture
def read(monkeypatch):
    """A function of configuration, extra arguments and salt: the request that leaves the front end."""

    def make(self, extra_args, cache_salt=None):
        return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra_args), cache_salt=cache_salt)

    monkeypatch.setattr(InputProcessor, "process_inputs", make)
    for _ in range(2):  # plug-ins may be loaded again
        encode_requests()
    return lambda config, *rest: InputProcessor.process_inputs(SimpleNamespace(vllm_config=config), *rest)


def test_the_salt_follows_options_and_the_client_s(read):
    half, dense = {"flexmask_gamma": 0.5}, {"flexmask_dense": True}
    given = [(half,), (dense,), (half, "mine"), ({"a": 1}, "mine"), (None,), (None, "flexmask dense")]
    salts = [read(config_of(), *each).cache_salt for each in given]
    assert salts == [read(config_of(), *each).cache_salt for each in given]
    assert len(set(salts)) == len(given) and salts[3:5] == ["mine", None]
    # a server without the backend
    assert read(config_of(backend="FLASH_ATTN"), dense, salts[1]).cache_salt == salts[1]


def test_a_gamma_is_refused_where_a_layer_runs_stock_on_a_rank(read):
    config = config_of({"layers": {"0": {"gamma": [1, 1, 0.9, 0.9]}}}, tensor_parallel_size=2)
    with pytest.raises(VLLMValidationError, match="by this server's settings layer 0 runs stock"):
        read(config, {"flexmask_gamma": 0.5})


@pytest.mark.parametrize("is_v2", [False, True])
def test_the_runner_tells_options_in_the_step_s_order(is_v2, read, monkeypatch):
    if is_v2:
        runners = pytest.importorskip("vllm.v1.worker.gpu.model_runner")
    else:
        from vllm.v1.worker import gpu_model_runner as runners
    config = config_of(use_v2_model_runner=is_v2)
    engine = engine_module.engine_of(config)

    def prepare(self, scheduler_output, *rest):
        alive = dict.fromkeys(scheduler_output.order)
        lengths = {"prefill_len_np" if is_v2 else "num_prompt_tokens": list(range(7, 7 + len(alive)))}
        self.requests, self.input_batch = alive, SimpleNamespace(req_ids=list(alive), **lengths)
        self.req_states = SimpleNamespace(req_id_to_index=alive)
        return self.input_batch

    name = "prepare_inputs" if is_v2 else "_update_states"
    monkeypatch.setattr(runners.GPUModelRunner, name, prepare)
    for _ in range(2):  # one per group of layers
        follow_requests(config)

    def step(new, order, config=config):
        """Run a step; the options, in the step's order, that the engine has after it."""
        made = [SimpleNamespace(req_id=each, sampling_params=read(config, given).sampling_params) for each, given in new.items()]
        runner, output = SimpleNamespace(vllm_config=config), SimpleNamespace(scheduled_new_reqs=made, order=order)
        getattr(runners.GPUModelRunner, name)(runner, output)
        found = engine_module.existing_engine(config)
        return None if found is None else found.options_in_step

    half, dense = RequestOptions(gamma=0.5), RequestOptions(dense=True)
    assert step({"a": {"flexmask_gamma": 0.5}, "b": None, "c": {"flexmask_dense": 1}}, "bac") == [None, half, dense]
    assert step({}, "ca") == [dense, half]
    assert engine.prompt_lens == [7, 8]
    # a name may be used again after its request has ended
    assert step({"a": None}, "ac") == [None, dense]
    assert step({"c": None, "d": {"flexmask_dense": 1}}, "cd") == [None, dense]
    # an engine without our backend
    assert step({}, "x", config_of(use_v2_model_runner=is_v2)) is None
    assert engine.options_in_step == [None, dense]
    # and one with it: each has its own requests
    second = config_of(use_v2_model_runner=is_v2)
    another = engine_module.engine_of(second)
    assert (step({"y": {"flexmask_gamma": 0.5}}, "y", second), step({}, "d")) == ([half], [dense])
    # vLLM's own requests are not counted
    role, split = object.__new__(engine_module.SparseLayer), StepSplit((), (), 0, 7)
    engine.roles = {"layer": role}
    for order, counted in ((["_warmup_0_", "_v2_mixed_warmup_decode_"], 0), (["d", "_warmup_1_"], 7), (["d"], 14)):
        step({}, order)
        engine.count_step(role, split)
        assert engine.counters.dense_tokens == counted
    # an engine is gone with those who hold it, whether it ever started or not
    gone = weakref.ref(another)
    del another
    gc.collect()
    assert gone() is None and engine_module.existing_engine(config) is engine


def test_a_runner_with_another_function_is_refused(monkeypatch):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.setattr(GPUModelRunner, "_update_states", lambda self, another: None)
    with pytest.raises(ImportError, match=r"GPUModelRunner\._update_states must take scheduler_output; got another"):
        follow_requests(config_of(use_v2_model_runner=False))
