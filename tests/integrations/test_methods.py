"""Every method in the adapter, and users' own."""

from functools import partial

import pytest
import torch

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.block_masks.positions import causal_mask
from tests.integrations.common import LENGTH, make_model, padded
from tests.integrations.families import FAMILIES


@pytest.mark.parametrize("method", ["causal", causal_mask])
@pytest.mark.parametrize("family", ["Llama", "GptOss"])
def test_takes_another_method(tokens, family, method):
    if not FAMILIES[family].available:
        pytest.skip("no such family in this release")
    model = make_model(family)
    model.set_attn_implementation(FAMILIES[family].dense)
    mask = padded(tokens)
    expected = model(tokens, attention_mask=mask).logits
    with flexmask_hf.sparse_prefill(model, method=method, block_size=32, dense_below=0, collect_masks=True) as run:
        logits = model(tokens, attention_mask=mask).logits
    assert (logits - expected)[mask != 0].abs().max() < 1e-4
    assert [len(run.masks[layer]) for layer in (0, 1)] == [1, 1]


@pytest.mark.usefixtures("without_kernel")
def test_method_gets_its_own_options_and_the_scores(model, tokens):
    seen = []

    def method(query, key, *, block_size, keep, scale=None, **visibility):
        seen.append((query.shape, block_size, keep, scale, set(visibility)))
        return causal_mask(query, key, block_size=block_size, **visibility)

    one_head = 40 * 17 * 17  # bytes of one head's mask
    with flexmask_hf.sparse_prefill(model, method=partial(method, keep=3), block_size=32, dense_below=0, max_mask_bytes=one_head):
        model(tokens)
    assert seen == [((1, 1, LENGTH, 16), 32, 3, 0.25, {"window", "attention_mask", "q_offset"})] * 16


def test_method_options_reach_the_method_and_are_saved(model, tokens):
    options = {"method": "minference", "plan": [[30, 60]] * 3 + [[10**6, 0]], "block_size": 32, "dense_below": 0}
    with flexmask_hf.sparse_prefill(model, **options, collect_masks=True, max_mask_bytes=1) as run:
        logits = model(tokens).logits
    kept = run.masks[0][0].to_dense()[0].sum((-2, -1))
    assert (kept[:3] < kept[3]).all()
    flexmask_hf.configure(model, **options)
    model.set_attn_implementation("flexmask")
    torch.testing.assert_close(model(tokens).logits, logits)


def test_function_cannot_be_saved(model):
    with pytest.raises(ValueError, match="method must be a name"):
        flexmask_hf.configure(model, method=causal_mask)
