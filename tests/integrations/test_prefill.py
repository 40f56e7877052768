"""The adapter's prefill: a tiny random model, ragged batches, several devices, memory; its registered names."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
from flexmask import flexprefill_mask
from flexmask.environment import check_release
from tests.integrations.common import KEEP_ALL, LENGTH, SPARSE, make_model, padded


def test_selects_on_the_queries_and_keys_of_the_layer(model, tokens):
    seen = {}

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        seen[module.layer_idx] = (query, key, scaling)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("recording", attention)
    model.set_attn_implementation("recording")
    model(tokens)
    options = {name: value for name, value in SPARSE.items() if name not in ("method", "dense_below")}
    query, key, scale = seen[0]
    mask, stats = flexprefill_mask(query, key, **options, scale=scale, return_stats=True)

    with flexmask_hf.sparse_prefill(model, **SPARSE, collect_masks=True) as run:
        model(tokens)
    assert torch.equal(run.masks[0][0].to_dense(), mask.to_dense())
    assert torch.equal(run.stats[0][0].density, stats.density)


@pytest.mark.parametrize("collected", [(False, False), (False, True), (True, False)])
def test_collects_what_is_asked_for(model, tokens, collected):
    stats, masks = collected
    with flexmask_hf.sparse_prefill(model, **SPARSE, collect_stats=stats, collect_masks=masks) as run:
        model(tokens)
    assert (len(run.stats), len(run.masks)) == (2 * stats, 2 * masks)


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


def test_import_registers_nothing():
    code = """
import flexmask.integrations.huggingface as flexmask_hf
from transformers import AttentionInterface, AttentionMaskInterface
names = [{*AttentionInterface().valid_keys()}, {*AttentionMaskInterface().valid_keys()}]
assert not any("flexmask" in name for both in names for name in both)
flexmask_hf.register()
assert all("flexmask" in interface().valid_keys() for interface in (AttentionInterface, AttentionMaskInterface))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("release", ["4.53.3", "5.25.0", "6.0.0"])
def test_other_transformers_are_named(release):
    with pytest.raises(ImportError, match=rf"transformers 4\.54 to 5\.24; got {release}"):
        check_release(release)


@pytest.mark.attention
@pytest.mark.skipif(sys.platform != "linux", reason="only there a process can reset its peak of memory")
def test_long_padded_prompt_stays_far_below_a_map_of_tokens():
    model = make_model(num_hidden_layers=1)

    def prefill(length):
        mask = (torch.arange(length) >= 100).long()[None]
        model(torch.arange(length)[None] % 96, attention_mask=mask, logits_to_keep=1)
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])

    with flexmask_hf.sparse_prefill(model, gamma=0.5, min_budget=128, dense_below=0) as run:
        prefill(600)  # compiles, for these sizes and then for all
        Path("/proc/self/clear_refs").write_text("5")
        before = prefill(700)
        growth = prefill(32768) - before
    assert run.stats[0][-1].density.mean() < 0.7
    # a bool per pair would be 1024 MiB
    assert growth < 32768**2 / 4
