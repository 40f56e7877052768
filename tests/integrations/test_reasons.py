"""A block says what did not run sparse, and why; without a run one log line a process and reason does."""

import contextlib
import logging

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
from flexmask import logged_once, sparse_attention, sparse_attention_varlen
from tests.integrations.common import SPARSE, switchable
from tests.integrations.families import VOCABULARY


@pytest.fixture
def mamba():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    return switchable(MambaForCausalLM(MambaConfig(**sizes)).eval())


def test_model_that_is_not_reached_is_named(mamba, tokens):
    with pytest.warns(UserWarning, match="did not reach MambaForCausalLM") as caught, flexmask_hf.sparse_prefill(mamba) as run:
        mamba(tokens[:, :20])
    assert run.stats == {}
    assert caught[0].filename == __file__


@pytest.mark.parametrize("what", ["nothing", "decoding", "error"])
def test_no_warning_where_nothing_was_prefilled(mamba, tokens, what):
    with contextlib.suppress(KeyError), flexmask_hf.sparse_prefill(mamba):
        if what == "decoding":
            mamba(tokens[:, :1])
        elif what == "error":
            mamba(tokens[:, :20])
            raise KeyError


@pytest.mark.parametrize("collect", [True, False])
def test_block_that_ran_dense_says_why(model, tokens, lines, collect):
    with flexmask_hf.sparse_prefill(model, collect_stats=collect) as run:
        model.generate(tokens[:, :200], max_new_tokens=3, do_sample=False)
    assert lines() == ["flexmask: all 2 layers ran dense: 200 tokens < dense_below 16384"]
    assert run.reasons == ({layer: ["200 tokens < dense_below 16384"] for layer in (0, 1)} if collect else {})


def test_statistics_say_why_a_layer_ran_dense(model, tokens, lines):
    with flexmask_hf.sparse_prefill(model, **SPARSE, dense_layers=(0,)) as run:
        model(tokens)
    assert not any("dense" in line for line in lines())
    assert [line for line in lines("INFO") if "dense" in line] == ["flexmask: 1 of 2 layers ran dense: in dense_layers"]
    assert run.reasons == {0: ["in dense_layers"], 1: [None]}
    assert {(row["layer"], row["reason"]) for row in run.rows()} == {(0, "in dense_layers"), (1, None)}


def test_options_of_layers_without_attention_are_named(model, tokens, lines, without_kernel):
    # as a layer of another kind in a mixture
    model.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    for layers in ({0: {"gamma": 0.5}, 1: {"gamma": 0.5}}, {1: {"gamma": 0.5}}):
        with flexmask_hf.sparse_prefill(model, block_size=32, dense_below=0, layers=layers):
            model(tokens)
    assert lines() == ["flexmask: options of layers that called no attention were not used: layers 0"]


SHORT = "flexmask: attention ran dense: {} tokens < dense_below 16384 (logged once per process and reason)"


@pytest.fixture
def lines(monkeypatch, caplog):
    """Messages of the log so far, in a process that has said nothing."""
    monkeypatch.setattr(logged_once, "_SAID", set())
    caplog.set_level(logging.DEBUG, "flexmask")

    def lines(level="WARNING"):
        return [each.getMessage() for each in caplog.records if each.name == "flexmask" and each.levelname == level]

    return lines


def test_a_registered_model_says_once_that_it_ran_dense(model, tokens, lines):
    flexmask_hf.register()
    expected = model(tokens[:, :200]).logits
    model.set_attn_implementation("flexmask")
    assert (model(tokens[:, :200]).logits - expected).abs().max() < 1e-4
    model.generate(tokens[:, :200], max_new_tokens=3, do_sample=False)
    assert lines() == [SHORT.format(200)]
    model(tokens[:, :100])
    assert lines() == [SHORT.format(200)]
    flexmask_hf.configure(model, dense_below=0, dense_layers=(0, 1))
    model(tokens[:, :200])
    assert lines()[1:] == ["flexmask: attention ran dense: in dense_layers (logged once per process and reason)"]


@pytest.mark.parametrize("packed", [False, True])
def test_calls_without_a_model_say_once_that_they_ran_dense_but_decoding_does_not(lines, packed):
    query = torch.randn(1, 2, 64, 16)
    sparse_attention(query[:, :, :1], query, query)
    assert lines() == []
    for _ in range(2):
        if packed:
            rows = query[0].transpose(0, 1)
            sparse_attention_varlen(rows, rows, rows, [0, 64])
        else:
            sparse_attention(query, query, query)
    assert lines() == [SHORT.format(64)]
