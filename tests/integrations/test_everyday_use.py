"""Everyday use: ragged batches, layers on other devices."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.common import KEEP_ALL, LENGTH, SPARSE, padded


def test_ragged_batch_is_its_prompts_one_by_one(model, tokens):
    lengths = (530, 341)
    mask = torch.stack([torch.arange(LENGTH) >= LENGTH - length for length in lengths]).long()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    # blocks lie elsewhere in a padded prompt: below gamma 1 other tokens may be kept
    for settings, rows in ((SPARSE, 1), (KEEP_ALL, 2)):
        with flexmask_hf.sparse_prefill(model, **settings):
            together = model.generate(tokens * mask, attention_mask=mask, **options)[:, -4:]
            alone = [model.generate(tokens[row : row + 1, LENGTH - lengths[row] :], **options)[0, -4:] for row in range(2)]
        assert torch.equal(together[:rows], torch.stack(alone[:rows]))


def test_layers_on_other_devices(model, tokens, tmp_path):
    """Accelerate moves what each layer is called with, masks too."""
    pytest.importorskip("accelerate")
    model.save_pretrained(tmp_path / "model")
    parts = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    parts |= {"model.norm": "cpu", "lm_head": "cpu"}
    spread = LlamaForCausalLM.from_pretrained(tmp_path / "model", device_map=parts, offload_folder=tmp_path / "disk").eval()
    mask = padded(tokens)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with flexmask_hf.sparse_prefill(model, **SPARSE):
        expected = model.generate(tokens, **options)
    with flexmask_hf.sparse_prefill(spread, **SPARSE) as run:
        assert torch.equal(spread.generate(tokens, **options), expected)
    assert run.stats[1][0].density.max() < 1
