"""The causal mask: it has all blocks with a visible key, and no others."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flexmask._torch import KNOWS_LENGTHS
from tests.block_masks.gallery import SETTINGS, block_map, by_block, lists_of, made, settings


@settings
def test_causal_allows_all_that_is_visible(setting):
    assert torch.equal(made("causal", setting).allowed, SETTINGS[setting].visible()[:, None])


@settings
def test_causal_calls_full_all_blocks_that_are(setting):
    full = block_map(*lists_of(made("causal", setting).mask)[2:])
    allowed = made("causal", setting).allowed
    everything_visible = by_block(allowed, SETTINGS[setting].block_size, "all", True)
    assert torch.equal(full, everything_visible)


@pytest.mark.skipif(not KNOWS_LENGTHS, reason="this torch's create_block_mask asks for pairs past the lengths, in blocks of 128")
@settings
def test_causal_has_the_blocks_of_create_block_mask(setting):
    chosen, mask = SETTINGS[setting], made("causal", setting).mask
    visible = chosen.visible()
    expected = create_block_mask(
        lambda b, h, q_idx, kv_idx: visible[b, q_idx, kv_idx],
        chosen.batch,
        None,
        chosen.q_len,
        chosen.kv_len,
        device="cpu",
        BLOCK_SIZE=chosen.block_size,
    )
    assert mask.shape == expected.shape
    assert torch.equal(mask.to_dense(), expected.to_dense())
    assert mask.sparsity() == expected.sparsity()
