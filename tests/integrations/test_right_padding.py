"""Batches padded on the right without an attention_mask: the padding does not decide what is selected."""

from __future__ import annotations

import logging
import math

import pytest
import torch

pytest.importorskip("transformers")

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations import right_padding
from flexmask.integrations.right_padding import deciding_rows
from tests.integrations.common import MARKS, SPARSE, make_model

pytestmark = MARKS


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5, 6, 7, 8], 4),
        ([5, 6, 7, 0], 4),  # one token may be the prompt's own
        ([5, 6, 0, 0], 2),
        ([5, 0, 0, 0], 1),
        ([0, 5, 0, 6], 4),
        ([0, 0, 6, 6], 2),
        ([0, 0, 0, 0], 4),  # says nothing
    ],
)
def test_a_run_of_one_token_at_the_end_does_not_decide(tokens, expected):
    assert deciding_rows(torch.tensor([tokens, [1, 2, 3, 4]])).tolist() == [expected, 4]


def test_padded_batch_selects_as_its_prompts_do_alone(tokens):
    """Heads of both kinds; `tests/test_deciding.py` has the rule itself."""
    model = make_model()
    length = 435
    batch = tokens.clone()
    batch[1, length:] = 0
    with flexmask_hf.flexprefill(model, **SPARSE, collect_masks=True) as run:
        expected = model(tokens[1:, :length]).logits
        logits = model(batch).logits
        model(tokens[1:])
    blocks = math.ceil(length / SPARSE["block_size"])
    for layer in (0, 1):
        alone, together, whole = (mask.to_dense() for mask in run.masks[layer])
        assert torch.equal(together[1, :, :blocks, :blocks], alone[0])
        assert not torch.equal(whole[0, :, :blocks, :blocks], alone[0])
        # no key is hidden: the padding attends too
        assert together[1].any(-1).all()
    kinds = run.stats[0][1].is_query_aware[1]
    assert kinds.any() and not kinds.all()
    assert torch.isfinite(logits).all()
    assert (logits[1, :length] - expected[0]).abs().max() < 1e-4


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
