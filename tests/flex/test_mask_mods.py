"""Values that mask_mods capture: later calls with others break nothing."""

import pytest
import torch
from torch.nn.attention.flex_attention import noop_mask

from flexmask import sparse_attention
from flexmask.base.selection import block_lists
from flexmask.flex.backend import flash_available
from flexmask.flex.block_mask import block_mask_from_lists
from tests.attention_calls import CPP_ERROR, call, check, padding
from tests.comparisons import assert_same_attention
from tests.expected import masked_attention

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
    options = {"head_dims": (32, 32), "dtype": torch.bfloat16} if backend == "flash" else {"head_dims": (16, 16)}
    for size, window, offset, padded in levels:
        given, mask = OFFSETS[offset], PADDINGS[padded]
        it = call(
            scale * Q_LEN,
            scale * KV_LEN,
            batch=2,
            block_size=sizes[size],
            scores={"window": scale * WINDOWS[window]},
            q_offset=None if given is None else scale * given,
            attention_mask=None if mask is None else mask.repeat_interleave(scale, 1),
            gamma=0.2,
            tau=0.0,
            **options,
        )
        check(it, device, backend=backend)


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
    it = call(8 * size, head_dims=(32, 32), dtype=dtype, block_size=size)
    case, moved = it.case, it.case.to(device)
    with torch.no_grad():
        out = sparse_attention(
            moved.query, moved.key, it.value.to(device), every_other, block_size=size, dense_below=0, backend=backend
        )
    place = torch.arange(8 * size)
    causal = place[:, None] >= place
    expected, _ = masked_attention(case.query, case.key, it.value, causal & (place // size % 2 == 0))
    assert_same_attention(out, expected)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_attention(out, masked_attention(case.query, case.key, it.value, causal)[0])
