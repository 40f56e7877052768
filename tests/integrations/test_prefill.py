"""The adapter's prefill on a tiny random model."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

import flexmask.integrations.huggingface as flexmask_hf
from flexmask import flexprefill_mask
from tests.integrations.common import SPARSE


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
