"""Batches padded on the right without an attention_mask: the padding does not decide what is selected."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("transformers")

import flexmask.integrations.huggingface as flexmask_hf
from flexmask import FlexPrefillConfig
from flexmask.base.inputs import attention_inputs
from flexmask.integrations import right_padding
from flexmask.integrations.right_padding import deciding_rows
from flexmask.search import search
from tests.integrations.common import MARKS, SPARSE, make_model

pytestmark = MARKS


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5, 6, 7, 8], 4),
        ([5, 6, 0, 0], 3),
        ([5, 0, 0, 0], 2),
        ([0, 5, 0, 6], 4),
        ([0, 0, 6, 6], 3),
        ([0, 0, 0, 0], 4),  # says nothing
    ],
)
def test_rows_after_the_first_of_a_run_at_the_end_do_not_decide(tokens, expected):
    assert deciding_rows(torch.tensor([tokens, [1, 2, 3, 4]])).tolist() == [expected, 4]


@pytest.mark.parametrize("index_queries", ["last", "middle"])
def test_selection_is_that_of_the_rows_that_decide(index_queries):
    """The lines of a prompt are those of its beginning alone; what comes after keeps blocks all the same."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 320, 16) * 3, torch.randn(2, 2, 320, 16)
    config = FlexPrefillConfig(gamma=0.5, tau=0.0, block_size=32, min_budget=0, index_queries=index_queries)
    padded = attention_inputs(query, key)._replace(deciding=torch.tensor([320, 224]))
    plain = search(attention_inputs(query, key), config, with_keep=True)
    found = search(padded, config, with_stats=True, with_keep=True)
    assert torch.equal(found.keep[0], plain.keep[0])
    assert not torch.equal(found.keep[1], plain.keep[1])
    alone = search(attention_inputs(query[1:, :, :224], key[1:, :, :224]), config, with_keep=True)
    assert torch.equal(found.keep[1, :, :7, :7], alone.keep[0])
    assert found.keep[1, :, 7:].any(-1).all()


def test_padded_batch_selects_as_its_prompts_do_alone(tokens, caplog):
    model = make_model()
    options = {**SPARSE, "tau": 0.0}  # the pooled map also has the blocks of padding
    length = 435
    batch = tokens.clone()
    batch[1, length:] = 0
    with flexmask_hf.flexprefill(model, **options, collect_masks=True) as run, caplog.at_level(logging.WARNING):
        model(tokens[1:, :length])
        logits = model(batch).logits
        model(tokens[1:])
    caplog.clear()
    alone, together, whole = (mask.to_dense() for mask in run.masks[0])
    blocks = length // 32
    # the first token of the padding is one of 32 rows that decide
    differs = (together[1, :, :blocks, :blocks] != alone[0, :, :blocks, :blocks]).float().mean()
    assert differs < 0.1
    assert not torch.equal(together[1], whole[0])
    # no key is hidden: the padding attends too
    assert torch.isfinite(logits).all()
    assert together[1, :, blocks + 1 :].any(-1).all()


def test_warns_once_where_the_token_ids_are_not_seen(model, tokens, caplog, monkeypatch):
    monkeypatch.setattr(right_padding, "_warned", False)
    embeddings = model.get_input_embeddings()(tokens)
    with flexmask_hf.flexprefill(model, **SPARSE), caplog.at_level(logging.WARNING, logger="flexmask"):
        model(tokens)
        model(tokens[:1])
        model(inputs_embeds=embeddings[:1])
        assert "attention_mask" not in caplog.text
        model(inputs_embeds=embeddings)
        model(inputs_embeds=embeddings)
    assert caplog.text.count("a batch without attention_mask runs sparse") == 1


def test_block_leaves_no_hook_behind(model):
    with flexmask_hf.flexprefill(model, **SPARSE):
        assert model.get_input_embeddings()._forward_pre_hooks
    assert not model.get_input_embeddings()._forward_pre_hooks
