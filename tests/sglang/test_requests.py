"""SGLang's tokenizer process reads the options of a request."""

from types import SimpleNamespace

import pytest

from flexmask.integrations.serving.options import RequestOptions, decoded_options, prefix_key
from flexmask.integrations.sglang.options import VARIABLE
from flexmask.integrations.sglang.registration import _encode_request


@pytest.fixture
def read(monkeypatch):
    """From parameters and a key to the request that goes to the scheduler; without a key it is one for embeddings."""

    def read(custom_params, server="{}", ranks=1, prefill="flexmask", **key):
        monkeypatch.setenv(VARIABLE, server)
        made = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom_params), **key)
        args = SimpleNamespace(prefill_attention_backend=prefill, tp_size=ranks)
        _encode_request(made, SimpleNamespace(server_args=args, model_config=SimpleNamespace(hf_config=None)))
        return made

    return read


def test_options_are_noted_and_enter_the_key(read):
    made = read({"flexmask_gamma": 0.5, "thinking_budget": 9}, extra_key="mine")
    assert decoded_options(made.sampling_params.custom_params) == RequestOptions(gamma=0.5)
    assert made.extra_key == prefix_key("mine", RequestOptions(gamma=0.5))
    # a client may choose any key, even one of ours
    assert read({"a": 1}, extra_key=made.extra_key).extra_key == prefix_key(made.extra_key, None) != made.extra_key
    assert [read(None, extra_key=key).extra_key for key in ("mine", None)] == ["mine", None]
    # a server without the backend
    assert read({"flexmask_dense": "?"}, prefill="fa3", extra_key=made.extra_key).extra_key == made.extra_key


def test_a_request_without_a_key_takes_no_options(read):
    """Requests for embeddings share prefixes, whatever their options."""
    for custom in (None, {}, {"flexmask_gamma": None, "flexmask_dense": None}):
        assert not hasattr(read(custom), "extra_key")
    with pytest.raises(ValueError, match="must be left out of requests that generate nothing"):
        read({"flexmask_dense": True})


def test_a_gamma_is_refused_where_a_layer_runs_stock_on_a_rank(read):
    with pytest.raises(ValueError, match="flexmask_gamma must be left out: by this server's settings layer 0 runs stock"):
        read({"flexmask_gamma": 0.5}, '{"layers": {"0": {"gamma": [1, 1, 0.9, 0.9]}}}', ranks=2, extra_key=None)
