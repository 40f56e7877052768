"""The options of the engines' plug-ins: vLLM's additional_config, SGLang's environment variable, and those of one request."""

import json
from types import SimpleNamespace

import pytest

from flexmask.dense_policy import DensePolicy
from flexmask.integrations.serving.layers import LayerShape, Stock, role_of_shape
from flexmask.integrations.serving.options import RequestOptions, ServingOptions, decoded_options, prefix_key, request_options
from flexmask.integrations.sglang.options import VARIABLE
from flexmask.integrations.sglang.options import serving_options as options_of_sglang
from flexmask.integrations.vllm.options import serving_options as options_of_vllm
from flexmask.settings import PrefillSettings

MODEL = SimpleNamespace(flexmask_config={"gamma": 0.8, "layers": {"2": {"gamma": [0.5, 1.0]}}})
# by engine: a kernel, the default one, and where options are given
ENGINES = {"vllm": ("TRITON_ATTN", "FLASH_ATTN", "additional_config"), "sglang": ("fa3", "triton", VARIABLE)}


@pytest.fixture
def of_variable(monkeypatch):
    def read(text, model=None):
        monkeypatch.setenv(VARIABLE, text)
        return options_of_sglang("triton", model)

    return read


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture
def of(engine, of_variable):
    if engine == "vllm":
        return lambda **options: options_of_vllm({"flexmask": options})
    return lambda **options: of_variable(json.dumps(options))


def test_settings_and_own_options_stand_side_by_side(of, engine):
    kernel, default, source = ENGINES[engine]
    given = {"method": "flexprefill", "gamma": [0.9, 1.0], "block_size": 64, "dense_below": 0, "dense_layers": [0]}
    options = of(**given, layers={"3": {"gamma": [0.5, 0.6]}}, kernel=kernel, count_density=False, log_every=5)
    assert (options.settings.method, options.settings.options) == ("flexprefill", {"gamma": (0.9, 1.0)})
    assert options.settings.layer_method(3).options["gamma"] == (0.5, 0.6)
    assert (options.settings.dense_layers, options.policy) == ((0,), DensePolicy(0, 64, (0,)))
    assert (options.kernel, options.count_density, options.log_every, options.source) == (kernel, False, 5, source)
    assert of(gamma=0.9).kernel == default


def test_the_model_s_config_counts_where_nothing_else_is_given():
    for additional in ({}, {"flexmask": {}}, {"flexmask": {"kernel": "FLASH_ATTN"}}, {"other": 1}, object()):
        options = options_of_vllm(additional, MODEL)
        assert (options.settings.options["gamma"], options.source) == (0.8, "the model's config.json")
        assert options.settings.layer_method(2).options["gamma"] == (0.5, 1.0)
    nested = SimpleNamespace(get_text_config=lambda: MODEL)
    assert options_of_vllm({}, nested).settings.options["gamma"] == 0.8
    assert options_of_vllm({"flexmask": {"gamma": 0.7}}, MODEL).settings.options["gamma"] == 0.7
    assert options_of_vllm({}, SimpleNamespace()).source == "defaults"


def test_a_file_holds_settings(of, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(of(gamma=0.7, dense_layers=[1]).settings.to_dict()), encoding="utf-8")
    options = of(file=str(path))
    assert (options.settings.options["gamma"], options.settings.dense_layers, options.source) == (0.7, (1,), str(path))
    with pytest.raises(ValueError, match="file cannot be combined with other settings; got \\['gamma'\\] too"):
        of(file=str(path), gamma=0.9)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"settings.json: must be a JSON object of options; got list"):
        of(file=str(path))


def test_the_variable_may_name_a_file(of_variable, tmp_path):
    path = tmp_path / "options.json"
    path.write_text('{"gamma": 0.7, "count_density": false}', encoding="utf-8")
    options = of_variable(str(path))
    assert (options.settings.options["gamma"], options.count_density) == (0.7, False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gama": 0.9}, ValueError, "method 'hybrid' takes .* got 'gama'; .* kernel, file, min_rows, count_density, log_every"),
        ({"kernel": "FLASHINFER"}, ValueError, "kernel must be"),
        ({"count_density": 1}, TypeError, "count_density must be true or false; got 1"),
        ({"min_rows": -1}, ValueError, "min_rows must be"),
        ({"min_rows": 1.5}, TypeError, "min_rows must be"),
        ({"log_every": 0}, ValueError, "log_every must be > 0 seconds; got 0"),
        ({"file": 3}, TypeError, "file must be a path; got int"),
    ],
)
def test_wrong_options_are_refused_by_name(of, options, error, message):
    with pytest.raises(error, match=message):
        of(**options)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ('{"gama": 0.9}', ValueError, "^FLEXMASK_SGLANG: "),
        ("[1]", TypeError, "FLEXMASK_SGLANG must be a dict of options; got list"),
        ("{gamma: 1}", ValueError, "FLEXMASK_SGLANG must be a JSON object or the path of a file with one: Expecting"),
        ("/no/such/file", ValueError, "the path of a file with one; got '/no/such/file'"),
        ('{"gamma": 0.9, "gamma": 0.8}', ValueError, "^FLEXMASK_SGLANG must be a JSON object .*: .* got 'gamma' twice"),
        pytest.param("[" * 10**5, ValueError, "^FLEXMASK_SGLANG must be a JSON object", id="deep"),
        ({"gama": 0.9}, ValueError, r"^additional_config\['flexmask'\]: method 'hybrid' takes"),
        ([1], TypeError, "must be a dict of options; got list"),
    ],
)
def test_a_wrong_variable_or_additional_config_is_refused_by_name(of_variable, given, error, message):
    with pytest.raises(error, match=message):
        of_variable(given) if isinstance(given, str) else options_of_vllm({"flexmask": given})


def options_of(*arguments, **options):
    return lambda: ServingOptions(PrefillSettings(*arguments, **options))


DEFAULTS = options_of()


def requested(params, read=DEFAULTS, ranks=1):
    """The options of the first request that a front end gets."""
    return request_options(params, SimpleNamespace(), read, ranks)


def test_a_request_chooses_a_gamma_or_dense_attention():
    nothing = (None, {}, {"another": 1}, {"flexmask_dense": False}, {"flexmask_dense": 0}, {7: 1})
    # as other parameters of a request that are null
    for given in (*nothing, {"flexmask_gamma": None}, {"flexmask_dense": None}, {"flexmask_gamma": None, "flexmask_dense": None}):
        assert requested(given) is None
    assert requested({"flexmask_gamma": 0.5, "another": 1}) == RequestOptions(gamma=0.5)
    for no in (False, 0, None):
        assert requested({"flexmask_gamma": 1, "flexmask_dense": no}) == RequestOptions(gamma=1.0)
    for true in (True, 1, 1.0):
        assert requested({"flexmask_dense": true, "flexmask_gamma": None}) == RequestOptions(dense=True)


def test_what_no_front_end_of_ours_has_read_is_no_option():
    for options in (RequestOptions(gamma=0.5), RequestOptions(dense=True)):
        assert decoded_options({"another": 1, **options.encoded_in(None)}) == options
    for read in (7, "ab", [0.5], [9.0, False], [0.0, False], [True, False], [0.5, 1], [0.5, False, 1], {"a": 1}, None):
        assert decoded_options({"flexmask_read": read}) is None
    for given in (None, 7, [1], {}):
        assert decoded_options(given) is None


def test_prefixes_have_one_key_for_each_pair_of_options_and_the_client_s_key():
    """No client reaches another pair's by what it calls its own."""
    options = [None, RequestOptions(dense=True), *(RequestOptions(gamma=gamma) for gamma in (0.9, 0.93, 0.94, 1.0))]
    clients = {None, "mine", "3", " ", ":", "none", "flexmask ", "Flexmask dense: "}
    for _ in range(2):
        clients |= {prefix_key(client, each) for client in clients for each in options}
        clients |= {f"{client}{each}" for client in (None, "mine") for each in ("flexmask dense", "flexmask gamma 0.9")}
    keys = {(client, each): prefix_key(client, each) for client in clients for each in options}
    assert len(set(keys.values())) == len(keys)
    # known to routers outside
    assert (prefix_key(None, None), prefix_key("mine", None)) == (None, "mine")
    # engines know no difference
    assert prefix_key("", options[1]) == prefix_key(None, options[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"flexmask_gama": 0.5}, "a request takes flexmask_gamma and flexmask_dense; got 'flexmask_gama'"),
        ({"flexmask_gamma": 2}, r"flexmask_gamma must be in \(0, 1\]; got 2"),
        ({"flexmask_gamma": float("nan")}, "flexmask_gamma must be finite; got nan"),
        ({"flexmask_gamma": "0.5"}, "flexmask_gamma must be a number; got str"),
        ({"flexmask_gamma": True}, "flexmask_gamma must be a number; got bool"),
        ({"flexmask_gamma": [0.5, 0.6]}, "flexmask_gamma must be a number; got list"),
        ({"flexmask_dense": "yes"}, "flexmask_dense must be true or false; got 'yes'"),
        ({"flexmask_dense": True, "flexmask_gamma": 0.9}, "flexmask_gamma cannot be combined with flexmask_dense"),
    ],
)
def test_bad_options_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        requested(given)


def test_the_front_end_reads_the_server_s_options_once_for_the_first_gamma():
    holder, reads = SimpleNamespace(), []

    def read():
        reads.append(holder)
        return DEFAULTS()

    for params in (None, {"flexmask_dense": True}):
        request_options(params, holder, read)
    assert reads == []
    for gamma in (0.5, 0.6):
        assert request_options({"flexmask_gamma": gamma}, holder, read) == RequestOptions(gamma=gamma)
    assert reads == [holder]


def test_a_method_without_gamma_takes_none():
    with pytest.raises(ValueError, match="flexmask_gamma needs a method with gamma; this server runs 'causal'"):
        requested({"flexmask_gamma": 0.5}, options_of("causal"))
    assert requested({"flexmask_dense": True}, options_of("causal")) == RequestOptions(dense=True)


ONES, MIXED = [1.0] * 4, [1.0, 1.0, 1.0, 0.9]


@pytest.mark.parametrize(
    ("options", "ranks", "stock"),
    [
        ({"gamma": 1}, 1, 0),
        ({"gamma": ONES}, 1, 0),
        ({"layers": {3: {"gamma": 0.5}, 2: {"gamma": 1.0}}}, 1, 2),
        ({"gamma": 1.0, "layers": {n: {"gamma": 0.9} for n in range(3)}}, 1, 3),
        # a rank of two has heads of gamma 1 alone
        ({"layers": {1: {"gamma": MIXED}}}, 2, 1),
        ({"layers": {1: {"gamma": MIXED}}}, 1, None),
        # all that the model has
        ({"gamma": 1.0, "layers": {n: {"gamma": 0.9} for n in range(3)}, "dense_layers": [3]}, 1, None),
        # not stock: `layers` gives no role to a dense layer, and without the policy gamma 1 runs sparse
        ({"layers": {2: {"gamma": 1.0}}, "dense_layers": [2]}, 1, None),
        ({"gamma": 1.0, "dense_below": 0}, 1, None),
        ({"method": "flexprefill", "gamma": 1.0, "max_budget": 2048}, 1, None),
    ],
)
def test_a_gamma_is_refused_where_the_server_s_own_keeps_a_layer_stock(options, ranks, stock):
    """As `role_of_shape` decides on each rank of a model of four layers and four heads."""
    server = ServingOptions(PrefillSettings(**options), num_layers=4)
    shape = LayerShape(num_heads=4 // ranks, num_kv_heads=1, head_dim=32, v_head_dim=32, scale=0.2)
    roles = [role_of_shape(shape, number, server.settings, rank, ranks) for number in range(4) for rank in range(ranks)]
    assert (Stock("every head keeps every block") in roles) == (stock is not None)
    if stock is None:
        assert requested({"flexmask_gamma": 0.5}, lambda: server, ranks) == RequestOptions(gamma=0.5)
        return
    with pytest.raises(ValueError, match=f"flexmask_gamma must be left out: by this server's settings layer {stock} runs stock"):
        requested({"flexmask_gamma": 0.5}, lambda: server, ranks)
    assert requested({"flexmask_dense": True}, lambda: server, ranks) == RequestOptions(dense=True)


def test_the_model_s_layers_are_counted_by_its_config():
    text = SimpleNamespace(num_hidden_layers=3)
    assert options_of_vllm({}, SimpleNamespace(get_text_config=lambda: text)).num_layers == 3
    assert options_of_vllm({}, SimpleNamespace()).num_layers is None
    # without one, layers without options of their own are among the model's
    with pytest.raises(ValueError, match="layer 1 runs stock"):
        requested({"flexmask_gamma": 0.5}, options_of(gamma=1.0, layers={0: {"gamma": 0.5}}))
