"""Other libraries' wrappers around attention and mask functions, as kvpress installs when it is imported."""

import contextlib
import functools
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.common import KEEP_ALL, SPARSE, dynamic_cache

pytestmark = pytest.mark.usefixtures("fresh_process", "_no_calls")

CALLS: list[tuple[int, int]] = []  # layer and rows
_original: Any = None
_originals: dict[str, Any] = {}


@pytest.fixture
def _no_calls():
    CALLS.clear()


def given(function, module, query, key, value, *args, **kwargs):
    """Acts as a wrapper: keyed on an attribute of the layer, as kvpress's."""
    CALLS.append((module.layer_idx, query.shape[2]))
    return function(module, query, key, value * getattr(module, "value_share", 1.0), *args, **kwargs)


def closure(function):
    return lambda *args, **kwargs: given(function, *args, **kwargs)


def twice(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return closure(inner)


def by_name(function):
    global _original
    _original = function
    return _by_name


def _by_name(module, *args, **kwargs):
    return given(_original, module, *args, **kwargs)


class Wrapper:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return given(self.function, *args, **kwargs)


SHAPES = {
    "closure": closure,
    "two": twice,
    "global": by_name,
    "object": Wrapper,
    "partial": lambda function: functools.partial(given, function),
}


def in_models(wrap, names=None):
    for name, function in ALL_ATTENTION_FUNCTIONS.items():
        if names is None or name in names:
            ALL_ATTENTION_FUNCTIONS[name] = wrap(function)


def for_all(wrap):
    AttentionInterface.register("sdpa", wrap(AttentionInterface()["sdpa"]))
    if "flexmask" in AttentionInterface():
        AttentionInterface.register("flexmask", wrap(AttentionInterface()["flexmask"]))


PLACES = {"every name": in_models, "SDPA": lambda wrap: in_models(wrap, ["sdpa"]), "registered": for_all}


def two_steps(model, tokens):
    """Logits of a prompt and of a token after it."""
    cache = dynamic_cache(model)
    return torch.cat([model(each, past_key_values=cache).logits for each in (tokens[:, :40], tokens[:, 40:41])], 1)


def set_shares(model):
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.value_share = 0.5 + number


def in_a_block(model, tokens):
    with flexmask_hf.sparse_prefill(model):
        return two_steps(model, tokens)


@pytest.mark.parametrize("order", ["theirs first", "ours first", "a block first", "in a block"])
@pytest.mark.parametrize(
    ("shape", "place"),
    [*((each, "SDPA" if each == "global" else "every name") for each in SHAPES), ("closure", "SDPA"), ("object", "registered")],
)
def test_a_wrapper_runs_once_in_every_layer(model, tokens, shape, place, order):
    expected = two_steps(model, tokens)
    install = functools.partial(PLACES[place], SHAPES[shape])
    if order == "ours first":
        flexmask_hf.register()
    with flexmask_hf.sparse_prefill(model) if "block" in order else contextlib.nullcontext():
        if order == "in a block":
            install()
    if order != "in a block":
        install()
    for _ in range(2):
        with flexmask_hf.sparse_prefill(model) as run:
            assert (two_steps(model, tokens) - expected).abs().max() < 1e-4
        assert len(run.stats) == 2
    set_shares(model)
    expected_with = two_steps(model, tokens)
    CALLS.clear()
    with flexmask_hf.sparse_prefill(model):
        found = two_steps(model, tokens)
    assert (expected_with - expected).abs().max() > 1e-2
    assert (found - expected_with).abs().max() < 1e-4
    assert CALLS == [(0, 40), (1, 40), (0, 1), (1, 1)]


@pytest.mark.attention
def test_a_wrapper_runs_around_a_sparse_prefill(model, tokens):
    in_models(closure)
    with flexmask_hf.sparse_prefill(model, **SPARSE) as run:
        plain = model(tokens).logits
    set_shares(model)
    expected = model(tokens).logits
    with flexmask_hf.sparse_prefill(model, **KEEP_ALL):
        assert (model(tokens).logits - expected).abs().max() < 1e-4
    with flexmask_hf.sparse_prefill(model, **SPARSE) as run:
        assert (model(tokens).logits - plain).abs().max() > 1e-2
    assert run.summary().density < 0.9


def test_a_wrapper_runs_in_a_compiled_forward(model, tokens):
    in_models(closure)
    set_shares(model)
    expected = model(tokens[:, :40]).logits
    with flexmask_hf.sparse_prefill(model):
        found = torch.compile(model, backend="eager")(tokens[:, :40]).logits
    assert (found - expected).abs().max() < 1e-4


def test_a_wrapper_runs_behind_another_name(model, tokens):
    model.set_attn_implementation("flex_attention")
    in_models(closure)
    flexmask_hf.register(name="flex_attention", dense_below=1000)
    flexmask_hf.register(name="flex_attention", dense_below=2000)
    with flexmask_hf.sparse_prefill(model) as run:
        two_steps(model, tokens)
    two_steps(model, tokens)
    assert run.settings.call_options.policy.dense_below == 2000
    assert CALLS == 2 * [(0, 40), (1, 40), (0, 1), (1, 1)]


def test_what_cannot_be_wrapped_around_is_named_once(model, tokens):
    expected = two_steps(model, tokens)

    def hidden(module, *args, **kwargs):
        CALLS.append((module.layer_idx, 0))
        return _originals["sdpa"](module, *args, **kwargs)

    _originals["sdpa"] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = hidden
    with pytest.warns(UserWarning, match=r"test_foreign_wrappers\..*hidden stands for 'sdpa'"):
        found = in_a_block(model, tokens)
    assert (found - expected).abs().max() < 1e-4
    assert torch.equal(in_a_block(model, tokens), found)
    assert not CALLS


def test_another_mask_function_runs_in_decoding_and_is_named(model, tokens):
    rows = []

    def noted(**arguments):
        rows.append(arguments.get("q_length"))
        return sdpa_mask(**arguments)

    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = noted
    with pytest.warns(UserWarning, match="noted makes masks for 'sdpa'"):
        in_a_block(model, tokens)
    in_a_block(model, tokens)
    assert len(rows) == 2
