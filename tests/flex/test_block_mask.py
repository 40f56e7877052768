"""Masks saved, loaded, copied, moved, or in narrower blocks of keys; values that mask_mods capture, whatever later calls have."""

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, and_masks, noop_mask

from flexmask import flexprefill_mask, sparse_attention
from flexmask.base.head_groups import tiled_list_bytes
from flexmask.base.inputs import attention_inputs
from flexmask.base.selection import BlockLists, block_lists
from flexmask.flex.backend import flash_available
from flexmask.flex.block_mask import block_mask_from_lists
from flexmask.flex.run import in_key_tiles
from tests.attention_calls import CPP_ERROR, call, check, padding
from tests.block_masks.definitions import MASKS, SPARSE
from tests.comparisons import assert_same_attention, dense_map
from tests.compile_support import assert_same_lists
from tests.expected import masked_attention, pairs_under


def saved(mask):
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"torch.save": saved, "pickle": lambda mask: pickle.loads(pickle.dumps(mask)), "deepcopy": copy.deepcopy}
CASES = {
    "whole": {},
    "padded, window, offset": {
        "attention_mask": padding(160, ("left", 40), ("holes", 7)), "window": 70, "q_offset": torch.tensor([10, 3]),
    },
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("method", ["flexprefill", "causal"])
def test_a_saved_pickled_or_copied_mask_is_the_same(way, case, method):
    query, key = 3 * torch.randn(2, 4, 130, 16), torch.randn(2, 2, 160, 16)
    mask = MASKS[method](query, key, block_size=32, **SPARSE[method], **case)
    got = way(mask)
    assert type(got) is type(mask)
    assert_same_lists(got, mask)
    assert got.BLOCK_SIZE == mask.BLOCK_SIZE and got.shape == mask.shape
    assert got.mask_mod.__name__ == mask.mask_mod.__name__
    visible = pairs_under(got, 130, 160)
    assert torch.equal(visible, pairs_under(mask, 130, 160)) and visible.any() and not visible.all()
    assert got.kv_indices.data_ptr() != mask.kv_indices.data_ptr()
    assert_same_lists(way(got), mask)


def small_mask():
    query = torch.randn(1, 2, 96, 16)
    return flexprefill_mask(query, query, block_size=32)


def test_changed_mask_is_not_taken_for_the_one_that_was_made():
    mask = small_mask()
    mask.mask_mod = and_masks(mask.mask_mod, lambda b, h, q, k: k > 5)
    assert copy.deepcopy(mask).mask_mod is mask.mask_mod and copy.copy(mask).mask_mod is mask.mask_mod
    for save in (pickle.dumps, saved):
        with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
            save(mask)
    # of a module
    mask.mask_mod = causal
    for way in WAYS.values():
        got = way(mask)
        assert type(got) is BlockMask and got.mask_mod is causal
        assert_same_lists(got, mask)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mask_moves_with_what_its_mask_mod_captures(case):
    query, key = torch.randn(2, 4, 130, 16), torch.randn(2, 2, 160, 16)
    mask = flexprefill_mask(query, key, gamma=0.5, block_size=32, min_budget=0, **case)
    index = [torch.zeros(1, dtype=torch.int32, device="meta")] * 4
    nameless = flexprefill_mask(query, key, gamma=0.5, block_size=32, min_budget=0, **case).to("meta")
    for moved in (mask.to("meta"), nameless):
        assert moved.kv_indices.device.type == "meta" and moved.mask_mod(*index).device.type == "meta"
    assert_same_lists(saved(mask.to("cpu")), mask)
    assert torch.equal(mask.to("cpu").to_dense(), mask.to_dense())
    mask.mask_mod = causal
    assert mask.to("cpu").mask_mod is causal


def test_dropped_mask_is_freed_at_once():
    mask = small_mask()
    lists = weakref.ref(mask.kv_indices)
    gc.disable()
    try:
        del mask
        assert lists() is None
    finally:
        gc.enable()


FLASH = pytest.mark.skipif(not flash_available(), reason="flash-attn-4 is not installed")
ON_GPU = [pytest.param("triton", marks=pytest.mark.gpu), pytest.param("flash", marks=[pytest.mark.gpu, FLASH])]

Q_LEN, KV_LEN = 200, 300
OFFSETS = (None, 41, torch.tensor([70, 3]))
PADDINGS = (None, padding(KV_LEN, ("left", 90), ("left", 7)), padding(KV_LEN, ("holes", 7), ("right", 60)))
WINDOWS = (200, 150, 250)
# one of three levels each of block size, window, offset and padding
FEW = [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2)]
EVERY_PAIR = [(i, j, (i + j) % 3, (i + 2 * j) % 3) for i in range(3) for j in range(3)]


@pytest.mark.attention
@CPP_ERROR
@pytest.mark.parametrize(
    ("backend", "levels"),
    [
        pytest.param("auto", FEW, id="cpu"),
        pytest.param("auto", EVERY_PAIR, id="cpu, every pair", marks=pytest.mark.slow),
        *(pytest.param(*each.values, EVERY_PAIR, marks=each.marks) for each in ON_GPU),
    ],
)
def test_one_process_serves_windows_block_sizes_offsets_and_paddings(backend, levels):
    device = "cpu" if backend == "auto" else "cuda"
    sizes = (128,) * 3 if backend == "flash" else (16, 32, 48)
    scale = 4 if backend == "flash" else 1  # blocks of 128 need longer prompts
    options: dict[str, Any] = {"head_dims": (32, 32), "dtype": torch.bfloat16} if backend == "flash" else {"head_dims": (16, 16)}
    for size, window, offset, padded in levels:
        given, mask = OFFSETS[offset], PADDINGS[padded]
        options["q_offset"] = None if given is None else scale * given
        options["attention_mask"] = None if mask is None else mask.repeat_interleave(scale, 1)
        options |= {"block_size": sizes[size], "scores": {"window": scale * WINDOWS[window]}}
        check(call(scale * Q_LEN, scale * KV_LEN, batch=2, gamma=0.2, tau=0.0, **options), device, backend=backend)


# pytorch#188322: the FLASH backend ignored block lists where the mask_mod is trivial
def every_other(query, key, block_size, **given):
    """A user's mask whose lists alone choose: the even key blocks."""
    blocks = (torch.arange(key.shape[2] // block_size, device=key.device) % 2 == 0).expand(1, 1, query.shape[2] // block_size, -1)
    lists = block_lists(blocks.contiguous(), torch.zeros_like(blocks[:, 0]))
    return block_mask_from_lists(lists, noop_mask, block_size, (query.shape[2], key.shape[2]))


@pytest.mark.attention
@pytest.mark.parametrize("backend", ["auto", *ON_GPU])
def test_lists_count_where_the_mask_mod_is_trivial(backend):
    device = "cpu" if backend == "auto" else "cuda"
    size, dtype = (16, torch.float32) if backend == "auto" else (128, torch.bfloat16)
    case = call(8 * size, head_dims=(32, 32), dtype=dtype, block_size=size)
    given = [x.to(device) for x in (case.query, case.key, case.value)]
    with torch.no_grad():
        out = sparse_attention(*given, every_other, block_size=size, dense_below=0, backend=backend)
    place = torch.arange(8 * size)
    causal = place[:, None] >= place
    expected, _ = masked_attention(case.query, case.key, case.value, causal & (place // size % 2 == 0))
    assert_same_attention(out, expected)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_attention(out, masked_attention(case.query, case.key, case.value, causal)[0])


def causal(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def drawn_mask(kv_len, size=128, rows=3):
    """Random partial and full blocks; entries behind the counts are poisoned."""
    keep, full = (torch.rand(2, heads, rows, -(-kv_len // size)) < 0.5 for heads in (3, 1))
    lists = block_lists(keep, full[:, 0])
    poisoned = [
        torch.where(torch.arange(indices.shape[-1]) < counts.unsqueeze(-1), indices, 7_000)
        for counts, indices in ((lists.kv_num_blocks, lists.kv_indices), (lists.full_kv_num_blocks, lists.full_kv_indices))
    ]
    given = (lists.kv_num_blocks, poisoned[0], lists.full_kv_num_blocks, poisoned[1])
    return block_mask_from_lists(given, causal, size, (rows * size, kv_len)), keep & ~full, keep & full


@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 128, 129, 192, 193, 1000, 1024])
@pytest.mark.parametrize("tile", [16, 64])
def test_each_block_is_listed_as_its_tiles_of_sizes_that_divide_it(kv_len, tile):
    mask, partial, full = drawn_mask(kv_len)
    assert all(in_key_tiles(mask, other) is mask for other in (80, 128, 256))
    narrow = in_key_tiles(mask, tile)
    assert narrow.BLOCK_SIZE == (128, tile) and narrow.mask_mod is causal
    assert tuple(narrow.seq_lengths) == (384, kv_len)
    existing = -(-kv_len // tile)
    lists = BlockLists(narrow.kv_num_blocks, narrow.kv_indices, narrow.full_kv_num_blocks, narrow.full_kv_indices)
    for counts, indices, expected in ((*lists[:2], partial), (*lists[2:], full)):
        assert (counts.dtype, indices.dtype) == (torch.int32, torch.int32)
        assert indices.is_contiguous() and indices.shape[-1] == existing
        assert int(indices.min()) >= 0 and int(indices.max()) < existing
        assert torch.equal(dense_map(counts, indices), expected.repeat_interleave(128 // tile, -1)[..., :existing])
        assert bool(((indices.diff(dim=-1) > 0) | (torch.arange(1, existing) >= counts.unsqueeze(-1))).all())


@pytest.mark.parametrize(("head_dims", "block_size", "lists"), [((256, 256), 128, 3), ((192, 128), 128, 0), ((256, 256), 64, 0)])
def test_memory_counts_the_lists_of_tiles(head_dims, block_size, lists):
    with FakeTensorMode():
        query, key, value = (torch.empty(1, 2, 1000, head_dims[i], device="cuda") for i in (0, 0, 1))
        inputs = attention_inputs(query, key, value)
    assert tiled_list_bytes(inputs, block_size) == lists * 8 * (-(-1000 // block_size)) ** 2
    assert tiled_list_bytes(attention_inputs(torch.empty(1, 2, 9, 256), torch.empty(1, 2, 9, 256)), 128) == 0
