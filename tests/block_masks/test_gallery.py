"""One matrix over the gallery: whatever a mask keeps, it is causal, complete in itself and agrees with its own mask_mod.

A new mask is tested by adding it to `MASKS`; what makes it sparse, and what makes it keep everything, goes into the tables here.
"""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import flexmask.block_masks
from flexmask import flexprefill_mask
from flexmask._torch import KNOWS_LENGTHS
from flexmask.backends import run_flex_attention
from flexmask.block_masks import MASKS, causal_mask
from tests.helpers import known_lengths, structured_inputs

FOLDER = Path(__file__).resolve().parents[2] / "block_masks"

# by mask: options under which it leaves something out of a short prompt, and options under which it leaves out nothing
SPARSE: dict[str, dict[str, Any]] = {"causal": {}, "flexprefill": {"gamma": 0.5, "min_budget": 0}}
KEEP_EVERYTHING: dict[str, dict[str, Any]] = {"causal": {}, "flexprefill": {"gamma": 1.0}}


@dataclass(frozen=True)
class Setting:
    """Sizes and the options that all masks share."""

    batch: int = 1
    num_heads: int = 4
    num_kv_heads: int = 4
    q_len: int = 256
    kv_len: int = 256
    block_size: int = 32
    window: int | None = None
    padding: str | None = None  # left, right or holes
    q_offset: int | tuple[int, ...] | None = None  # a tuple becomes a tensor
    dtype: torch.dtype = torch.float32

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(7)
        query, key = structured_inputs(
            generator, self.batch, self.num_heads, self.num_kv_heads, self.q_len, self.kv_len, head_dim=32
        )
        return query.to(device, self.dtype), key.to(device, self.dtype)

    def shared_options(self, device: torch.device | str) -> dict[str, Any]:
        offset: Any = self.q_offset
        if isinstance(offset, tuple):
            offset = torch.tensor(offset, device=device)
        return {
            "block_size": self.block_size,
            "window": self.window,
            "attention_mask": self.attention_mask(device),
            "q_offset": offset,
        }

    def attention_mask(self, device: torch.device | str) -> Tensor | None:
        if self.padding is None:
            return None
        valid = torch.ones(self.batch, self.kv_len, dtype=torch.int64, device=device)
        cut = torch.arange(1, self.batch + 1) * self.kv_len // (2 * self.batch + 1)
        for row, length in zip(valid, cut.tolist(), strict=True):
            if self.padding == "left":
                row[:length] = 0
            elif self.padding == "right":
                row[-length:] = 0
            else:
                row[length // 2 : length] = 0
                row[::5] = 0
        return valid

    def visible(self) -> Tensor:
        """Which pairs are visible, from the definition: (batch, q_len, kv_len) bool."""
        offset = self.kv_len - self.q_len if self.q_offset is None else self.q_offset
        position = torch.tensor(offset).expand(self.batch)[:, None] + torch.arange(self.q_len)  # (batch, q_len)
        distance = position[:, :, None] - torch.arange(self.kv_len)
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        valid = self.attention_mask("cpu")
        if valid is not None:
            valid = valid.bool()
            visible &= valid[:, None, :] & valid.gather(1, position)[:, :, None]
        return visible


SETTINGS = {
    "whole": Setting(batch=2, num_kv_heads=2),
    "ragged": Setting(q_len=333, kv_len=333, num_kv_heads=1),
    "one row": Setting(q_len=1, kv_len=63, block_size=16),
    "shorter than a block": Setting(q_len=10, kv_len=10, block_size=64),
    "chunk": Setting(q_len=129, kv_len=500, block_size=48, num_kv_heads=2),
    "bfloat16": Setting(q_len=1000, kv_len=1000, block_size=128, num_heads=2, num_kv_heads=1, dtype=torch.bfloat16),
    "left padding": Setting(batch=2, padding="left"),
    "right padding": Setting(batch=2, padding="right"),
    "holes and window": Setting(batch=2, q_len=200, kv_len=240, window=70, padding="holes"),
    "window of one token": Setting(q_len=100, kv_len=100, window=1),
    "offset": Setting(q_len=100, kv_len=400, q_offset=65),
    "offsets by batch row": Setting(batch=3, q_len=64, kv_len=300, q_offset=(0, 50, 236), window=90, padding="left"),
}
ON_GPU = ("whole", "offsets by batch row")  # one compilation each there

settings = pytest.mark.parametrize("setting", list(SETTINGS))
settings_and_devices = pytest.mark.parametrize(
    ("setting", "device"),
    [
        *((setting, "cpu") for setting in SETTINGS),
        *(pytest.param(setting, "cuda", marks=pytest.mark.gpu) for setting in ON_GPU),
    ],
)
all_masks = pytest.mark.parametrize("name", list(MASKS))


class Made(NamedTuple):
    """A mask and what its mask_mod allows."""

    mask: BlockMask
    allowed: Tensor  # (batch, mask heads, q_len, kv_len) bool, on the CPU


@functools.cache
def made(name: str, setting: str, device: str = "cpu") -> Made:
    chosen = SETTINGS[setting]
    mask = MASKS[name](*chosen.inputs(device), **SPARSE[name], **chosen.shared_options(device))
    allowed = create_mask(mask.mask_mod, chosen.batch, mask.shape[1], chosen.q_len, chosen.kv_len, device=device)
    return Made(mask, allowed.cpu())


def lists_of(mask: BlockMask) -> tuple[Tensor, ...]:
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices


def num_blocks(length: int, block_size: int) -> int:
    return -(-length // block_size)


def block_map(counts: Tensor, indices: Tensor) -> Tensor:
    """Bool map of the blocks listed, read entry by entry."""
    listed = torch.zeros(indices.shape, dtype=torch.bool)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in counts.shape)):
        row = tuple(place.tolist())
        listed[row][indices[row][: int(counts[row])].long().cpu()] = True
    return listed


def by_block(pairs: Tensor, block_size: int, reduction: str, fill: bool) -> Tensor:
    """`any` or `all` over the blocks of a map of pairs, whose tails are filled."""
    q_len, kv_len = pairs.shape[-2:]
    blocks = num_blocks(q_len, block_size), num_blocks(kv_len, block_size)
    padding = (0, blocks[1] * block_size - kv_len, 0, blocks[0] * block_size - q_len)
    tiles = F.pad(pairs, padding, value=fill).unflatten(-2, (blocks[0], block_size)).unflatten(-1, (blocks[1], block_size))
    tiles = tiles.transpose(-3, -2).flatten(-2)
    return tiles.any(-1) if reduction == "any" else tiles.all(-1)


def check_lists(mask: BlockMask, allowed: Tensor) -> None:
    """The lists name every block with an allowed pair, once, and call full only those without a hidden one."""
    block_size = mask.BLOCK_SIZE[0]
    partial, full = block_map(*lists_of(mask)[:2]), block_map(*lists_of(mask)[2:])
    assert not (partial & full).any(), "a block is in both lists"
    assert torch.equal(partial | full, by_block(allowed, block_size, "any", False))
    assert not (full & ~by_block(allowed, block_size, "all", True)).any(), "a full block has hidden pairs"


# Properties


@all_masks
@settings_and_devices
def test_has_the_shape_and_blocks_that_were_asked_for(name, setting, device):
    chosen, mask = SETTINGS[setting], made(name, setting, device).mask
    batch, heads, q_len, kv_len = mask.shape
    assert (batch, q_len, kv_len) == (chosen.batch, *known_lengths(chosen.q_len, chosen.kv_len, chosen.block_size))
    assert heads in (1, chosen.num_heads)
    assert mask.BLOCK_SIZE == (chosen.block_size, chosen.block_size)


@all_masks
@settings_and_devices
def test_lists_are_contiguous_int32_on_the_inputs_device(name, setting, device):
    chosen, mask = SETTINGS[setting], made(name, setting, device).mask
    rows = (*mask.shape[:2], num_blocks(chosen.q_len, chosen.block_size))
    for tensor, shape in zip(lists_of(mask), 2 * (rows, (*rows, num_blocks(chosen.kv_len, chosen.block_size))), strict=True):
        assert tensor.shape == shape
        assert tensor.dtype == torch.int32
        assert tensor.device.type == device
        assert tensor.is_contiguous()


@all_masks
@settings_and_devices
def test_indices_ascend_and_are_zero_past_the_count(name, setting, device):
    mask = made(name, setting, device).mask
    for counts, indices in (lists_of(mask)[:2], lists_of(mask)[2:]):
        listed = torch.arange(indices.shape[-1], device=device) < counts.unsqueeze(-1)
        assert (counts >= 0).all()
        assert (counts <= indices.shape[-1]).all()
        assert ((indices >= 0) & (indices < indices.shape[-1])).all()
        assert (indices[~listed] == 0).all()
        assert ((indices.diff(dim=-1) > 0) | ~listed[..., 1:]).all()


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
@settings_and_devices
def test_lists_agree_with_the_mask_mod(name, setting, device):
    check_lists(*made(name, setting, device))


@all_masks
@settings_and_devices
def test_to_dense_and_sparsity_agree_with_the_lists(name, setting, device):
    chosen, mask = SETTINGS[setting], made(name, setting, device).mask
    partial, full = block_map(*lists_of(mask)[:2]), block_map(*lists_of(mask)[2:])
    assert torch.equal(mask.to_dense().cpu().bool(), partial | full)
    pairs_kept = int((partial | full).sum()) * chosen.block_size**2
    q_len, kv_len = known_lengths(chosen.q_len, chosen.kv_len, chosen.block_size)
    assert mask.sparsity() == pytest.approx(100 * (1 - pairs_kept / (chosen.batch * mask.shape[1] * q_len * kv_len)))


@pytest.mark.parametrize("fault", ["dropped", "added", "full and partial swapped", "hidden block called full", "listed twice"])
def test_wrong_list_is_caught(fault):
    _, allowed = made("causal", "whole")
    mask = causal_mask(*SETTINGS["whole"].inputs("cpu"), block_size=32)
    counts, indices, full_counts, full_indices = lists_of(mask)
    if fault == "dropped":
        full_counts[0, 0, 5] -= 1
    elif fault == "added":
        indices[0, 0, 3, 1] = 6
        counts[0, 0, 3] += 1
    elif fault == "full and partial swapped":
        mask.kv_num_blocks, mask.full_kv_num_blocks = full_counts, counts
        mask.kv_indices, mask.full_kv_indices = full_indices, indices
    elif fault == "hidden block called full":
        full_indices[0, 0, 4, 4] = 4
        full_counts[0, 0, 4] += 1
        counts[0, 0, 4] = 0
    else:
        full_indices[0, 0, 4, 4] = 4
        full_counts[0, 0, 4] += 1
    with pytest.raises(AssertionError):
        check_lists(mask, allowed)


@all_masks
def test_sparse_settings_leave_something_out(name):
    kept = made(name, "whole").mask.to_dense().sum()
    causal = made("causal", "whole").mask.to_dense().expand(made(name, "whole").mask.to_dense().shape).sum()
    assert kept / causal < (0.9 if SPARSE[name] else 1.01)


@all_masks
@pytest.mark.parametrize("setting", ["ragged", "offsets by batch row"])
def test_no_value_is_read(name, setting):
    chosen = SETTINGS[setting]
    mode = FakeTensorMode()

    def fake(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) else x

    query, key = map(fake, chosen.inputs("cpu"))
    options = {option: fake(x) for option, x in chosen.shared_options("cpu").items()}
    # a fake tensor has no values: reading one, or a shape that depends on one, raises
    with mode:
        mask = MASKS[name](query, key, **SPARSE[name], **options)
        with pytest.raises(DataDependentOutputException):
            mask.kv_num_blocks.sum().item()
    assert mask.shape == made(name, setting).mask.shape


@all_masks
def test_traces_whole(name):
    chosen = SETTINGS["offsets by batch row"]
    options = {**SPARSE[name], **chosen.shared_options("cpu")}

    @torch.compile(fullgraph=True, backend="eager")
    def lists(query, key):
        return lists_of(MASKS[name](query, key, **options))

    for got, expected in zip(lists(*chosen.inputs("cpu")), lists_of(made(name, "offsets by batch row").mask), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.attention
@all_masks
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_keeping_everything_is_dense_attention(name, device):
    chosen = Setting(batch=2, num_kv_heads=2, q_len=300, kv_len=333, padding="left", window=200)
    query, key = chosen.inputs(device)
    value = torch.randn(key.shape, generator=torch.Generator().manual_seed(1)).to(device)
    mask = MASKS[name](query, key, **KEEP_EVERYTHING[name], **chosen.shared_options(device))
    backend = "cpu" if device == "cpu" else "triton"
    torch._dynamo.reset()  # compiled for these lengths, whatever ran before
    with torch.no_grad():
        out, _ = run_flex_attention(query, key, value, mask, 32**-0.5, None, backend, return_lse=False)
    visible = chosen.visible()[:, None].to(device)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
    expected = torch.where(visible.any(-1, keepdim=True), expected, 0.0)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)


@all_masks
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"query": torch.zeros(4, 64, 32)}, r"query must be \(batch, num_heads, q_len, head_dim\); got shape \(4, 64, 32\)"),
        ({"block_size": 40}, "block_size must be a multiple of 16 from 16 to 256; got 40"),
        ({"window": 0}, "window must be >= 1 token .*; got 0"),
        ({"attention_mask": torch.ones(1, 63, dtype=torch.bool)}, r"attention_mask must be .*\(1, 64\); got \(1, 63\)"),
        ({"q_offset": 1}, r"q_offset must be in \[0, kv_len - q_len = 0\]; got 1"),
    ],
    ids=["query", "block_size", "window", "attention_mask", "q_offset"],
)
def test_wrong_arguments_are_refused(name, wrong, message):
    right = {"query": torch.zeros(1, 4, 64, 32), "key": torch.zeros(1, 2, 64, 32)}
    with pytest.raises(ValueError, match=message):
        MASKS[name](**{**right, **wrong})


# The causal mask


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


# The registry


def test_registry_exports_and_files_agree():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert set(MASKS) == files
    assert flexmask.block_masks.__all__ == ["MASKS", *(f"{name}_mask" for name in sorted(MASKS))]
    for name, function in MASKS.items():
        assert function is getattr(flexmask.block_masks, f"{name}_mask")
        assert function.__name__ == f"{name}_mask"
    assert MASKS["flexprefill"] is flexprefill_mask


def test_registry_and_readme_table_agree():
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+\.py)\) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(f"{name}_mask", f"{name}.py") for name in sorted(MASKS)]


@all_masks
def test_readme_table_names_every_knob(name):
    row = re.search(rf"^\| \[`{name}_mask`\].*$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    knobs = set(re.findall(r"`(\w+)`", row.group().rsplit(" | ", 1)[1]))
    not_knobs = {"query", "key", *inspect.signature(causal_mask).parameters, "scale", "softcap", "config", "return_stats"}
    assert knobs == set(inspect.signature(MASKS[name]).parameters) - not_knobs


@all_masks
def test_shared_arguments_are_those_of_flexprefill_mask(name):
    shared, own = inspect.signature(causal_mask).parameters, inspect.signature(MASKS[name]).parameters
    assert set(shared) <= set(own)
    for argument, parameter in shared.items():
        assert own[argument] == parameter
        assert own[argument] == inspect.signature(flexprefill_mask).parameters[argument]


@all_masks
def test_mask_mod_carries_the_name(name):
    assert made(name, "whole").mask.mask_mod.__name__.startswith(f"{name}(")


@pytest.mark.parametrize("table", [SPARSE, KEEP_EVERYTHING])
def test_every_mask_is_in_the_tables_of_this_file(table):
    assert set(table) == set(MASKS)
