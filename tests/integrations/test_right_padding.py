"""Batches padded on the right without an attention_mask: the padding does not decide what is selected.

`tests/integrations/test_on_device.py` compares masks.
"""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("transformers")

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations import right_padding
from flexmask.integrations.right_padding import deciding_rows
from tests.integrations.common import MARKS, SPARSE

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
