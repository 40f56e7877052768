"""The adapter's prefill: a tiny random model, ragged batches, devices and what is read of them, memory; registered names."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DynamicCache, LlamaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
from flexmask import flexprefill_mask, hybrid_mask
from flexmask.environment import check_transformers
from flexmask.integrations.huggingface import call
from tests.integrations.common import BATCH, KEEP_ALL, LENGTH, SPARSE, make_model, padded, static_cache
from tests.repository import python


def tensors_of_the_first_layer(model, tokens):
    """Query, key and scale."""
    seen = []

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        seen.append((query, key, scaling))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("recording", attention)
    model.set_attn_implementation("recording")
    model(tokens)
    model.set_attn_implementation("sdpa")
    return seen[0]


def test_selects_on_the_queries_and_keys_of_the_layer(model, tokens):
    options = {name: value for name, value in SPARSE.items() if name not in ("method", "dense_below")}
    query, key, scale = tensors_of_the_first_layer(model, tokens)
    mask, stats = flexprefill_mask(query, key, **options, scale=scale, return_stats=True)

    with flexmask_hf.sparse_prefill(model, **SPARSE, collect_masks=True) as run:
        model(tokens)
    assert torch.equal(run.masks[0][0].to_dense(), mask.to_dense())
    assert torch.equal(run.stats[0][0].density, stats.density)


@pytest.mark.parametrize(
    ("layers", "number", "by_name"), [({}, 1, False), ({1: {"gamma": 0.9}}, 2, False), ({}, 1, True)], ids=str
)
def test_layers_with_the_same_settings_share_a_plan(model, tokens, layers, number, by_name):
    if by_name:
        flexmask_hf.configure(model, **SPARSE, layers=layers)
        flexmask_hf.register()
        model.set_attn_implementation("flexmask")
    with nullcontext() if by_name else flexmask_hf.sparse_prefill(model, **SPARSE, layers=layers):
        for mask in (None, padded(tokens), None):
            with patch.object(call, "plan_call", wraps=call.plan_call) as made:
                out = model(tokens, attention_mask=mask).logits
            assert made.call_count == number
            with patch.object(call.LayerCall, "plan", call.LayerCall._new_plan):  # which layers do not share
                assert torch.equal(model(tokens, attention_mask=mask).logits, out)


@pytest.mark.parametrize("collected", [(False, False), (False, True), (True, False)])
def test_collects_what_is_asked_for(model, tokens, collected):
    stats, masks = collected
    with flexmask_hf.sparse_prefill(model, **SPARSE, collect_stats=stats, collect_masks=masks) as run:
        model(tokens)
    assert (len(run.stats), len(run.masks)) == (2 * stats, 2 * masks)


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
    python("-c", code)


@pytest.mark.parametrize("release", ["4.53.3", "5.25.0", "6.0.0"])
def test_other_transformers_are_named(release):
    with pytest.raises(ImportError, match=rf"transformers 4\.54 to 5\.24; got {release}"):
        check_transformers(release)


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


@pytest.mark.parametrize("lengths", [(265, 265), (1, LENGTH - 1), (LENGTH - 1, 1)], ids=str)
def test_packed_positions_are_refused_over_a_cache(device, tokens, lengths):
    model, tokens = make_model().to(device), tokens.to(device)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *arguments: torch.cuda.synchronize() if device.type == "cuda" else None)
    positions = torch.arange(LENGTH, device=device)[None]
    # after a sequence of one token the positions are 0 and 0
    packed = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    with flexmask_hf.sparse_prefill(model):
        model(tokens, position_ids=positions)
        with pytest.raises(NotImplementedError, match=r"packed sequences \(position_ids"):
            model(tokens, position_ids=packed, attention_mask=torch.ones_like(tokens))
        model(tokens, position_ids=positions)


# hybrid's, under which the length of the prompt decides
BY_LENGTH = {"gamma": 0.96, "block_size": 32, "min_budget": 0, "min_coverage": 0.0, "last_rows_dense": False}


@pytest.mark.attention
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chunks_of_a_named_prompt_select_by_its_length(model, tokens, compiled):
    """As single calls do: the first of two chunks keeps more, the last what it keeps without."""
    query, key, scale = tensors_of_the_first_layer(model, tokens[:1, :200])
    run_model = torch.compile(model) if compiled else model
    kept = {}
    for prompt_len in (None, 400, 4000):
        cache = DynamicCache(config=model.config)
        with flexmask_hf.sparse_prefill(model, **BY_LENGTH, dense_below=0, prompt_len=prompt_len) as run:
            for part in tokens[:1, :400].split(200, 1):
                run_model(part, past_key_values=cache)
        kept[prompt_len] = [stats.density for stats in run.stats[0]]
        alone = hybrid_mask(query, key, **BY_LENGTH, scale=scale, prompt_len=prompt_len, return_stats=True)[1]
        assert torch.equal(kept[prompt_len][0], alone.density)
    assert torch.equal(kept[None][1], kept[400][1]) and (kept[None][0] < kept[400][0]).any()
    assert (kept[400][1] < kept[4000][1]).any()


def test_the_sequences_of_a_pack_are_whole_prompts(model, tokens):
    bounds = [0, 200, 400]
    packed = {"position_ids": torch.arange(200).repeat(2)[None], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    densities = []
    for prompt_len in (None, 4000):
        with flexmask_hf.sparse_prefill(model, **BY_LENGTH, dense_below=0, prompt_len=prompt_len) as run:
            model(tokens[:1, :400], use_cache=False, **packed)
        densities.append(torch.stack([stats.density for stats in run.stats[0]]))
    assert torch.equal(*densities) and densities[0].shape[0] == 2


@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_the_length_of_prompts_is_checked(model, wrong, error):
    with pytest.raises(error, match="prompt_len must be"):
        flexmask_hf.sparse_prefill(model, prompt_len=wrong)


@pytest.mark.attention
@pytest.mark.parametrize("with_mask", [True, False], ids=["mask", "no mask"])
def test_dense_below_in_chunks_over_a_static_cache(device, tokens, with_mask):
    """On a GPU the padding mask, if any, gives the tokens so far."""
    model, tokens = make_model().to(device), tokens.to(device)
    mask = padded(tokens) if with_mask else None
    chunks = [(first, min(first + 200, LENGTH)) for first in range(0, LENGTH, 200)]

    def prefill(cache):
        parts = [(tokens[:, first:end], None if mask is None else mask[:, :end]) for first, end in chunks]
        return torch.cat([model(part, attention_mask=seen, past_key_values=cache).logits for part, seen in parts], 1)

    expected = prefill(static_cache(model, 700))
    # the floor keeps everything: at gamma 1 all heads would run dense. FlexAttention's kernel for GPUs wants blocks of 64
    keep_all = {**KEEP_ALL, "gamma": 0.9, "min_budget": 10**6, "dense_below": 300, "block_size": 64}
    with flexmask_hf.sparse_prefill(model, **keep_all) as run:
        found = prefill(static_cache(model, 700))
    known = with_mask or device.type == "cpu"
    assert [stats.dense for stats in run.stats[0]] == ([True, False, False] if known else [True] * 3)
    if not known:
        assert run.reasons[0] == [f"{end - first} tokens < dense_below 300" for first, end in chunks]
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool, device=device) if mask is None else mask != 0
    assert (found - expected)[real].abs().max() < 1e-3
