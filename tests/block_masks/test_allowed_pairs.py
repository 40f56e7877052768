"""Every mask of the gallery shows a row nothing hidden, its own position, and everything where everything is kept."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

from flexmask._torch import CPU_TAKES_UNBACKED_SIZES
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks import MASKS
from flexmask.flex.run import run_flex_attention
from tests.block_masks.gallery import KEEP_EVERYTHING, SETTINGS, SPARSE, Setting, all_masks, made, settings_and_devices


@all_masks
@settings_and_devices
def test_no_row_sees_what_is_hidden_from_it(name, setting, device):
    allowed, visible = made(name, setting, device).allowed, SETTINGS[setting].visible()
    assert not (allowed & ~visible[:, None]).any()


@all_masks
@settings_and_devices
def test_every_row_keeps_its_own_position(name, setting, device):
    allowed, visible = made(name, setting, device).allowed, SETTINGS[setting].visible()
    sees_something = visible.any(-1)
    last_visible = torch.where(sees_something, visible.shape[-1] - 1 - visible.flip(-1).int().argmax(-1), 0)
    own = last_visible[:, None, :, None].expand(*allowed.shape[:3], 1)
    assert torch.equal(allowed.gather(-1, own).squeeze(-1), sees_something[:, None].expand(allowed.shape[:3]))


@all_masks
def test_sparse_settings_leave_something_out(name):
    kept = made(name, "whole").mask.to_dense().sum()
    causal = made("causal", "whole").mask.to_dense().expand(made(name, "whole").mask.to_dense().shape).sum()
    assert kept / causal < (0.9 if SPARSE[name] else 1.01)


@pytest.fixture(scope="module")
def lengths_forgotten():
    """What is compiled here is compiled for these lengths, whatever ran before; masks of the same heads share it."""
    torch._dynamo.reset()


@pytest.mark.attention
@pytest.mark.usefixtures("lengths_forgotten")
@all_masks
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_keeping_everything_is_dense_attention(name, device):
    chosen = Setting(batch=2, num_kv_heads=2, q_len=300, kv_len=333, padding="left", window=200)
    query, key = chosen.inputs(device)
    value = torch.randn(key.shape, generator=torch.Generator().manual_seed(1)).to(device)
    mask = MASKS[name](query, key, **KEEP_EVERYTHING[name], **chosen.shared_options(device))
    backend = "cpu" if device == "cpu" else "triton"
    if not CPU_TAKES_UNBACKED_SIZES:
        torch._dynamo.reset()  # the C++ of this torch compiles for constant lengths alone
    with torch.no_grad():
        out, _ = run_flex_attention(attention_inputs(query, key, value), mask, backend)
    visible = chosen.visible()[:, None].to(device)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
    expected = torch.where(visible.any(-1, keepdim=True), expected, 0.0)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)
