"""Everyday use: generate, batch, pipelines, threads, compiled decoding, offloading."""

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.mask import PrefillMask
from tests.integrations.cells import RELEASE, static_cache
from tests.integrations.common import BATCH, KEEP_ALL, LENGTH, MARKS, SPARSE, make_model, padded

pytestmark = MARKS


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


def test_two_models_generate_in_two_threads(tokens):
    models = [make_model(seed=seed) for seed in (0, 1)]
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    settings = ({**SPARSE, "gamma": 0.4}, KEEP_ALL)

    def one_by_one(number):
        with flexmask_hf.sparse_prefill(models[number], **settings[number]) as run:
            return models[number].generate(tokens, **options), run.stats[1][0].density

    expected = [one_by_one(number) for number in (0, 1)]
    results: dict[int, list[Any]] = {0: [], 1: []}
    threads = [threading.Thread(target=lambda n=n: results[n].extend(one_by_one(n) for _ in range(3))) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (sequence, density) in enumerate(expected):
        assert len(results[number]) == 3
        assert all(torch.equal(each[0], sequence) and torch.equal(each[1], density) for each in results[number])


def test_static_decode_compiles_whole(model, tokens):
    expected = model(tokens).logits[:, -1]
    cache = static_cache(model, LENGTH + 8)
    last = {"position_ids": torch.full((BATCH, 1), LENGTH - 1)}
    if RELEASE < (5, 4):
        last["cache_position"] = torch.tensor([LENGTH - 1])
    with flexmask_hf.sparse_prefill(model, **KEEP_ALL):
        model(tokens[:, :-1], past_key_values=cache, attention_mask=torch.ones_like(tokens[:, :-1]))
        step = torch.compile(model, fullgraph=True, backend="eager")
        logits = step(tokens[:, -1:], past_key_values=cache, **last).logits[:, -1]
    assert (logits - expected).abs().max() < 1e-4


def test_mask_moves_with_the_model():
    padding = torch.ones(1, 4, dtype=torch.bool)
    moved = PrefillMask((1, 1, 4, 4), torch.tensor(0), padding, 3).to("meta", non_blocking=True)
    assert moved.offset.device.type == moved.attention_mask.device.type == "meta"
    assert (moved.window, moved.shape) == (3, (1, 1, 4, 4))


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


@pytest.mark.slow
@pytest.mark.attention
@pytest.mark.parametrize("way", ["padding mask", "static cache"])
def test_sparse_prefill_compiles_whole(way, model, tokens):
    """One graph of the whole model, sparse in it."""
    dense = model(tokens).logits

    def prefill(**given):
        return model(tokens, **given).logits

    # a cache made in the graph fails (torch 2.13)
    given = [{"past_key_values": static_cache(model, LENGTH + 8)} for _ in range(2)]
    if way == "padding mask":
        given = [{"attention_mask": torch.ones_like(tokens), "use_cache": False}] * 2
    with flexmask_hf.sparse_prefill(model, **SPARSE) as run:
        expected = prefill(**given[0])
        logits = torch.compile(prefill, fullgraph=True)(**given[1])
    for calls in run.stats.values():
        uncompiled, compiled = (stats.density for stats in calls)
        assert compiled.max() < 0.9
        torch.testing.assert_close(compiled, uncompiled, atol=0.02, rtol=0)
    near, far = ((each - expected).abs().mean() for each in (logits, dense))
    assert near < far / 10, (near, far)
