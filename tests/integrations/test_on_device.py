"""Prompts that the adapter reads without waiting for the device, on a GPU and a CPU."""

import pytest
import torch

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.cells import static_cache
from tests.integrations.common import BATCH, KEEP_ALL, LENGTH, make_model, padded


def options_on(device, options):
    """FlexAttention's kernel for GPUs takes blocks of 64 tokens and more."""
    return {**options, "block_size": 64} if device.type == "cuda" else options


def wait_for(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def test_packed_positions_are_refused(device, tokens):
    model, tokens = make_model().to(device), tokens.to(device)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *arguments: wait_for(device))
    positions = torch.arange(LENGTH, device=device)[None]
    with flexmask_hf.sparse_prefill(model):
        model(tokens, position_ids=positions)
        with pytest.raises(NotImplementedError, match=r"packed sequences \(position_ids"):
            model(tokens, position_ids=positions % 265)
        model(tokens, position_ids=positions)


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
    # the floor keeps everything: at gamma 1 all heads would run dense
    keep_all = {**KEEP_ALL, "gamma": 0.9, "min_budget": 10**6, "dense_below": 300}
    with flexmask_hf.sparse_prefill(model, **options_on(device, keep_all)) as run:
        found = prefill(static_cache(model, 700))
    known = with_mask or device.type == "cpu"
    assert [stats.dense for stats in run.stats[0]] == ([True, False, False] if known else [True] * 3)
    if not known:
        assert run.reasons[0] == [f"{end - first} tokens < dense_below 300" for first, end in chunks]
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool, device=device) if mask is None else mask != 0
    assert (found - expected)[real].abs().max() < 1e-3
