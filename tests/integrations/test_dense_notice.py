"""Where no run records it, one log line a process and reason says that attention ran dense."""

import logging

import pytest
import torch

import flexmask.integrations.huggingface as flexmask_hf
from flexmask import dense_policy, sparse_attention, sparse_attention_varlen

SHORT = "flexmask: attention ran dense: {} tokens < dense_below 16384 (logged once per process and reason)"


@pytest.fixture
def lines(monkeypatch, caplog):
    """Messages of the log so far, in a process that has said nothing."""
    monkeypatch.setattr(dense_policy, "_said", set())
    caplog.set_level(logging.DEBUG, "flexmask")
    return lambda: [each.getMessage() for each in caplog.records if each.name == "flexmask" and each.levelname == "WARNING"]


def test_a_registered_model_says_once_that_it_ran_dense(model, tokens, lines):
    flexmask_hf.register()
    model.set_attn_implementation("flexmask")
    model.generate(tokens[:, :200], max_new_tokens=3, do_sample=False)
    assert lines() == [SHORT.format(200)]
    model(tokens[:, :100])
    assert lines() == [SHORT.format(200)]
    flexmask_hf.configure(model, dense_below=0, dense_layers=(0, 1))
    model(tokens[:, :200])
    assert lines()[1:] == ["flexmask: attention ran dense: in dense_layers (logged once per process and reason)"]


def test_a_run_logs_its_own_line_only(model, tokens, lines):
    with flexmask_hf.sparse_prefill(model):
        model(tokens[:, :200])
    assert lines() == ["flexmask: all 2 layers ran dense: 200 tokens < dense_below 16384"]


@pytest.mark.parametrize("packed", [False, True])
def test_plain_calls_say_it_too(lines, packed):
    query = torch.randn(1, 2, 64, 16)
    for _ in range(2):
        if packed:
            rows = query[0].transpose(0, 1)
            sparse_attention_varlen(rows, rows, rows, [0, 64])
        else:
            sparse_attention(query, query, query)
    assert lines() == [SHORT.format(64)]


def test_decoding_is_no_news(lines):
    query = torch.randn(1, 2, 64, 16)
    sparse_attention(query[:, :, :1], query, query)
    assert lines() == []
