"""The choice of FlexAttention's backend by GPU, and the FLASH backend's trivial masks."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import noop_mask

from flexmask._torch import HAS_FLASH_BACKEND
from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.flex import backend, packed
from flexmask.flex.backend import chosen_backend
from flexmask.flex.mask_mods import kept_mask_mod, limited_mask_mod, visible_mask_mod


@pytest.fixture
def chosen(monkeypatch):
    """The choice on a GPU of some capability, with flash-attn-4 installed."""

    def choose(name, capability, block_size=128, head_dim=128, dtype=torch.bfloat16):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (capability, 0))
        monkeypatch.setattr(backend, "_HAS_FLASH", True)
        with FakeTensorMode():
            query = torch.empty(1, 2, 256, head_dim, dtype=dtype, device="cuda")
        return chosen_backend(name, AttentionInputs(query, query, query, 1.0), block_size, False)

    return choose


@pytest.mark.parametrize("capability", [7, 8, 9, 10, 11, 12])
def test_auto_takes_flash_only_where_it_was_seen_to_work(chosen, capability):
    assert chosen("auto", capability) == ("flash" if capability == 9 else "triton")
    assert chosen("triton", capability) == "triton"


def test_flash_runs_by_name_on_hopper(chosen):
    assert chosen("flash", 9) == "flash"


@pytest.mark.parametrize("capability", [10, 11])
def test_flash_by_name_is_untested_on_blackwell(chosen, capability):
    with pytest.warns(UserWarning, match=rf'backend="flash" is untested on compute capability {capability}, .* blocks of 256'):
        assert chosen("flash", capability) == "flash"
    with pytest.raises(ValueError, match=r'backend="flash" cannot run here: it needs block_size 128 \(got 256\)'):
        chosen("flash", capability, 256)


@pytest.mark.parametrize("capability", [7, 8, 12])
def test_flash_is_refused_on_other_gpus(chosen, capability):
    reason = rf"it needs a Hopper or Blackwell GPU of compute capability 9, 10 or 11 \(got {capability}\)"
    with pytest.raises(ValueError, match=reason):
        chosen("flash", capability)


# The FLASH backend ignores the block lists of a mask_mod that it takes for trivial.


def is_trivial(mask_mod):
    """Return torch's verdict on the graph that Inductor sees of a mask_mod."""
    if not HAS_FLASH_BACKEND:  # nor can 2.5.1 import the package in which later releases have it
        pytest.skip("needs a torch with the FLASH backend")
    flash = pytest.importorskip("torch._inductor.kernel.flex.flex_flash_attention")
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._inductor.decomposition import select_decomp_table

    index = [torch.tensor(0, dtype=torch.int32) for _ in range(4)]
    with TransformGetItemToIndex():
        return flash.is_trivial_mask_graph(make_fx(mask_mod, decomposition_table=select_decomp_table())(*index))


def test_a_trivial_mask_is_seen():
    assert is_trivial(noop_mask)


@pytest.mark.parametrize(("window", "padded", "shifted"), [*itertools.product([None, 1, 10**6], [False, True], [None, 0, 40])])
def test_no_mask_of_ours_is_trivial(window, padded, shifted):
    query, key = torch.zeros(1, 1, 24, 16), torch.zeros(1, 1, 24 if shifted is None else 64, 16)
    mask = torch.ones(1, key.shape[2], dtype=torch.bool) if padded else None
    inputs = attention_inputs(query, key, window=window, attention_mask=mask, q_offset=shifted)
    visible = visible_mask_mod(inputs.with_offset())
    for mask_mod in (
        visible,
        kept_mask_mod(visible, torch.ones(1, 1, 1, 1, dtype=torch.bool), 64),
        limited_mask_mod(visible, noop_mask, "a user's"),
    ):
        assert not is_trivial(mask_mod)


def test_the_mask_of_a_pack_is_not_trivial():
    assert not is_trivial(packed._mask_mod(torch.zeros(64, dtype=torch.int32), torch.arange(64, dtype=torch.int32)))
