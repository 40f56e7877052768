"""Every mask: honest lists, nothing hidden, every row's own position, dense where everything is kept."""

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from flexmask._torch import CPU_TAKES_UNBACKED_SIZES, KNOWS_LENGTHS
from flexmask.base.inputs import attention_inputs
from flexmask.flex.run import run_flex_attention
from tests.attention_calls import padding
from tests.block_masks.gallery import KEEP_EVERYTHING, MASKS, SETTINGS, SPARSE, Setting, all_masks, made, masks_and_settings
from tests.comparisons import assert_honest
from tests.compile_support import lists_of


@masks_and_settings
def test_lists_are_those_of_the_mask_mod_in_flex_attentions_layout(name, setting, device):
    chosen, mask = SETTINGS[setting], made(name, setting, device).mask
    batch, heads = mask.shape[:2]
    assert batch == chosen.batch and heads in (1, chosen.num_heads)
    assert mask.BLOCK_SIZE == (chosen.block_size, chosen.block_size)
    assert_honest(mask, (chosen.q_len, chosen.kv_len))
    lists = lists_of(mask)
    for tensor in lists:
        assert tensor.dtype == torch.int32 and tensor.device.type == device and tensor.is_contiguous()
    for counts, indices in (lists[:2], lists[2:]):
        listed = torch.arange(indices.shape[-1], device=device) < counts.unsqueeze(-1)
        assert (indices[~listed] == 0).all(), "entries past the count"
        assert ((indices.diff(dim=-1) > 0) | ~listed[..., 1:]).all(), "indices do not ascend"


@masks_and_settings
def test_a_row_sees_nothing_hidden_and_its_own_position(name, setting, device):
    allowed, visible = made(name, setting, device).allowed, SETTINGS[setting].visible()
    assert not (allowed & ~visible[:, None]).any()
    sees_something = visible.any(-1)
    last_visible = torch.where(sees_something, visible.shape[-1] - 1 - visible.flip(-1).int().argmax(-1), 0)
    own = last_visible[:, None, :, None].expand(*allowed.shape[:3], 1)
    assert torch.equal(allowed.gather(-1, own).squeeze(-1), sees_something[:, None].expand(allowed.shape[:3]))


@all_masks
def test_sparse_settings_leave_something_out(name):
    kept, causal = (made(each, "whole").mask.to_dense().expand(2, 4, 8, 8).sum() for each in (name, "causal"))
    assert kept / causal < (0.9 if SPARSE[name] else 1.01)


@pytest.fixture(scope="module")
def lengths_forgotten():
    """Forget what was compiled before: masks of the same heads share compilations."""
    torch._dynamo.reset()


@pytest.mark.attention
@pytest.mark.usefixtures("lengths_forgotten")
@all_masks
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_keeping_everything_is_dense_attention(name, device):
    shared = {"attention_mask": padding(333, ("left", 66), ("left", 133)), "q_len": 300, "kv_len": 333, "window": 200}
    chosen = Setting(batch=2, num_kv_heads=2, **({} if name == "published" else shared))
    query, key = chosen.inputs(device)
    value = torch.randn(key.shape, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.compiler.set_stance("force_eager"):  # other tests compile masks
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


@pytest.mark.skipif(not KNOWS_LENGTHS, reason="this torch's create_block_mask asks for pairs past the lengths, in blocks of 128")
@pytest.mark.parametrize("setting", SETTINGS)
def test_causal_has_the_blocks_of_create_block_mask(setting):
    chosen, (mask, allowed) = SETTINGS[setting], made("causal", setting)
    visible = chosen.visible()
    assert torch.equal(allowed, visible[:, None])
    expected = create_block_mask(
        lambda b, h, q_idx, kv_idx: visible[b, q_idx, kv_idx],
        visible.shape[0],
        None,
        *visible.shape[1:],
        "cpu",
        chosen.block_size,
    )
    assert mask.shape == expected.shape
    assert torch.equal(mask.to_dense(), expected.to_dense())
    assert mask.sparsity() == expected.sparsity()
