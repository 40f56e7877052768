"""Every mask: honest lists, own positions, dense where it keeps everything; no value is read, it traces whole, bounded memory."""

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from flexmask import METHODS, select
from flexmask._torch import CPU_TAKES_UNBACKED_SIZES, KNOWS_LENGTHS
from flexmask.base.inputs import attention_inputs
from flexmask.flex.run import run_flex_attention
from tests.attention_calls import padding
from tests.block_masks.definitions import TESTED
from tests.block_masks.gallery import MASKS, SETTINGS, SPARSE, Setting, all_masks, made, masks_and_settings, serves
from tests.comparisons import assert_honest, assert_one_list
from tests.compile_support import lists_of


@masks_and_settings
def test_lists_are_those_of_the_mask_mod_in_flex_attentions_layout(name, setting, device):
    chosen, mask = SETTINGS[setting], made(name, setting, device).mask
    batch, heads = mask.shape[:2]
    assert batch == chosen.batch and heads in (1, chosen.num_heads)
    assert mask.BLOCK_SIZE == (chosen.block_size, chosen.block_size)
    assert_honest(mask, (chosen.q_len, chosen.kv_len))
    for counts, indices in (lists_of(mask)[:2], lists_of(mask)[2:]):
        assert counts.device.type == device
        assert_one_list(counts, indices)


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
        mask = MASKS[name](query, key, **TESTED[name].everything, **chosen.shared_options(device))
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
    sizes = (visible.shape[0], None, *visible.shape[1:])
    expected = create_block_mask(lambda b, h, q, k: visible[b, q, k], *sizes, device="cpu", BLOCK_SIZE=chosen.block_size)
    assert mask.shape == expected.shape and torch.equal(mask.to_dense(), expected.to_dense())
    assert mask.sparsity() == expected.sparsity()


# with padding, a window and offsets by batch row, where a method serves these
FULLEST = {name: "offsets by batch row" if serves(name, "offsets by batch row") else "whole" for name in MASKS}


@pytest.mark.parametrize(("name", "setting"), [*FULLEST.items(), *((name, "ragged") for name in MASKS if serves(name, "ragged"))])
def test_no_value_is_read(name, setting):
    chosen = SETTINGS[setting]
    mode = FakeTensorMode()

    def fake(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) else x

    query, key = map(fake, chosen.inputs("cpu"))
    options = {option: fake(x) for option, x in chosen.shared_options("cpu").items()}
    # reading a fake tensor raises
    with mode:
        mask = MASKS[name](query, key, **SPARSE[name], **options)
        with pytest.raises(DataDependentOutputException):
            mask.kv_num_blocks.sum().item()
    assert mask.shape == made(name, setting).mask.shape


@all_masks
def test_traces_whole(name):
    chosen = SETTINGS[FULLEST[name]]
    options = {**SPARSE[name], **chosen.shared_options("cpu")}
    torch._dynamo.reset()  # the function below would run out of recompilations

    @torch.compile(fullgraph=True, backend="eager")
    def lists(query, key):
        return lists_of(MASKS[name](query, key, **options))

    for got, expected in zip(lists(*chosen.inputs("cpu")), lists_of(made(name, FULLEST[name]).mask), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", [name for name in MASKS if serves(name, "left padding")])
def test_a_batch_row_that_is_all_padding_has_density_0(name):
    query, key = SETTINGS["left padding"].inputs("cpu")
    tokens = torch.ones(query.shape[0], key.shape[2], dtype=torch.bool)
    tokens[-1] = False
    stats = MASKS[name](query, key, **SPARSE[name], block_size=32, attention_mask=tokens, return_stats=True)[1]
    assert (stats.density[-1] == 0).all() and (stats.density[:-1] > 0).all()


TOKENS, HEADS, HEAD_DIM = 131072, 16, 64


class Largest(TorchDispatchMode):
    """The largest storage that any operator returned."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("name", MASKS)
def test_nothing_exceeds_the_bytes_that_the_method_states_and_grows_with_the_square_of_the_tokens(name):
    by_rows = METHODS[name].row_numbers is not None
    with FakeTensorMode(), Largest() as largest:
        # methods that go slice by slice need only the last rows
        rows = 512 if name == "oracle" else 4096 if by_rows else TOKENS
        query, key = torch.empty(1, HEADS, rows, HEAD_DIM), torch.empty(1, 4, TOKENS, HEAD_DIM)
        stated = HEADS * METHODS[name].checked(128, {}).for_inputs(attention_inputs(query, key)).head_bytes
        largest.nbytes = 0
        MASKS[name](query, key)
    a_slice = 4 * max(select.MOST_NUMBERS, HEADS * 128 * TOKENS) if by_rows else 0
    assert largest.nbytes <= max(stated, a_slice) and largest.nbytes < TOKENS**2 / 8
