"""SGLang's tokenizer process reads the options of a request."""

from types import SimpleNamespace

import pytest

from flexmask.integrations.serving.options import RequestOptions, decoded_options
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
    given = [({"flexmask_gamma": 0.5}, None), ({"flexmask_dense": True}, None), ({"flexmask_dense": True}, "mine")]
    keys = [read(custom, extra_key=key).extra_key for custom, key in given]
    # a client may choose any key, also one of these
    chosen = [*keys, "flexmask dense", "mine", None]
    keys += [read(custom, extra_key=key).extra_key for key in chosen for custom in (None, {"a": 1})]
    assert len(set(keys)) == 3 + 6
    assert keys[-4:] == ["mine", "mine", None, None]
    # a server without the backend
    assert read({"flexmask_dense": "?"}, prefill="fa3", extra_key=keys[0]).extra_key == keys[0]


def test_a_request_without_a_key_takes_no_options(read):
    """Requests for embeddings share prefixes."""
    for custom in (None, {}, {"flexmask_gamma": None, "flexmask_dense": None}):
        assert not hasattr(read(custom), "extra_key")
    with pytest.raises(ValueError, match="must be left out of requests that generate nothing"):
        read({"flexmask_dense": True})


@pytest.mark.parametrize(
    ("server", "ranks"), [('{"gamma": 1}', 1), ('{"layers": {"0": {"gamma": [1, 1, 0.9, 0.9]}}}', 2)], ids=["all", "of a rank"]
)
def test_a_gamma_is_refused_where_a_layer_runs_stock(server, ranks, read):
    with pytest.raises(ValueError, match="flexmask_gamma must be left out: by this server's settings layer 0 runs stock"):
        read({"flexmask_gamma": 0.5}, server, ranks, extra_key=None)
    assert read({"flexmask_dense": True}, server, ranks, extra_key=None).extra_key
