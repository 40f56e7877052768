"""Every export says what the mask says, pair by pair; on a GPU FlashInfer and flash-attn-4 compute with them."""

import itertools
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from flexmask.block_masks import causal_mask
from flexmask.export import to_block_map, to_bsr, to_flash_attn, to_flashinfer, to_index_list
from tests.comparisons import dense_map
from tests.export.selections import LONG, SHAPES, drawn, over_tokens

GEOMETRIES = {"causal": {}, "window": {"window": 20}, "padded": {"padded": True, "batch": 2}, "empty heads": {"empty": (0, 2)}}
ALL = [
    pytest.param(shape, geometry, id=f"{name}, {kind}") for name, shape in SHAPES.items() for kind, geometry in GEOMETRIES.items()
]
CAUSAL = [pytest.param(shape, {}, id=name) for name, shape in {**SHAPES, **LONG}.items()]
CAUSAL += [pytest.param((50, 129, 32), {"offset": 7}, id="offset"), pytest.param((129, 129, 32), {"empty": (1,)}, id="empty")]


def pairs_of_lists(case, lists, columns):
    """Pairs of flash-attn-4's lists: full blocks whole, others by visibility."""
    counts, indices, full_counts, full_indices, sizes = lists
    partial, full = dense_map(counts, indices), dense_map(full_counts, full_indices)
    lengths = case.pairs.shape[2:]
    assert sizes[1] == columns
    assert not (partial & full).any() and not (partial | full)[..., -(-lengths[1] // columns) :].any()
    return over_tokens(full, sizes, lengths) | (over_tokens(partial, sizes, lengths) & case.visible)


@pytest.mark.parametrize(("shape", "geometry"), ALL)
def test_maps_lists_and_bsr_hold_the_kept_blocks_and_pairs(shape, geometry):
    case = drawn(shape, **geometry)
    for dtype in (torch.bool, torch.uint8, torch.int32):
        found = to_block_map(case.mask, dtype=dtype)
        assert found.dtype == dtype and found.is_contiguous() and torch.equal(found.bool(), case.keep)
    indices, counts = to_index_list(case.mask)
    assert indices.dtype == counts.dtype == torch.int32
    blocks = case.keep.shape[-1]
    listed = torch.where(case.keep, torch.arange(blocks), blocks).sort(-1).values
    assert torch.equal(indices, listed.where(listed < blocks, -1).int())
    assert torch.equal(counts, case.keep.sum(-1).int())
    for tile in (shape[2], shape[2] // 2):
        lists = to_flash_attn(case.mask, kv_tile=tile) if tile < shape[2] else to_flash_attn(case.mask)
        assert torch.equal(pairs_of_lists(case, lists, tile), case.pairs)
    q_len, kv_len, size = shape
    for prompt, head in itertools.product(range(len(case.keep)), range(3)):
        blocks = to_bsr(case.mask, head=head, batch_index=prompt, with_pairs=True)
        rows = torch.arange(len(blocks.indptr) - 1).repeat_interleave(blocks.indptr.long().diff())
        columns, pairs = blocks.indices.long(), torch.zeros(blocks.shape, dtype=torch.bool)
        assert (((columns.diff() > 0) | (rows.diff() > 0)).all()) and len(columns) == blocks.indptr[-1]
        pairs.view(-1, size, blocks.shape[1] // size, size).transpose(1, 2)[rows, columns] = blocks.mask
        assert torch.equal(pairs[:q_len, :kv_len], case.pairs[prompt, head])
        assert not pairs[q_len:].any() and not pairs[:, kv_len:].any()


def pairs_of_flashinfer(blocks, q_len, kv_len):
    """Pairs that FlashInfer's kernel computes: causality counts from the end of the gathered keys."""
    assert blocks.causal and int(blocks.block_col_sz.min()) > 0
    pairs = []
    for kept, rows, keys in zip(blocks.block_mask_map, blocks.block_row_sz, blocks.block_col_sz, strict=True):
        assert (rows.sum(), keys.sum()) == (q_len, kv_len)
        row_block, key_block = (torch.arange(len(sizes)).repeat_interleave(sizes) for sizes in (rows, keys))
        gathered = kept.bool()[row_block][:, key_block]
        row = torch.arange(q_len) - (rows.cumsum(0) - rows)[row_block]
        last = row + gathered.sum(-1) - rows[row_block]
        pairs.append(gathered & (gathered.cumsum(-1) - 1 <= last[:, None]))
    return torch.stack(pairs)


@pytest.mark.parametrize(("shape", "geometry"), CAUSAL)
def test_flashinfer_gathers_the_pairs(shape, geometry):
    case = drawn(shape, **geometry)
    found = pairs_of_flashinfer(to_flashinfer(case.mask, 3), *shape[:2])
    assert torch.equal(found, case.pairs[0])


def test_flashinfer_serves_one_prompt_of_many_merges_heads_and_shares_a_map():
    case = drawn((50, 129, 32), heads=4, batch=2)
    found = pairs_of_flashinfer(to_flashinfer(case.mask, 2, batch_index=1, merge_heads=True), 50, 129)
    assert torch.equal(found, case.pairs[1].unflatten(0, (2, 2)).any(1))
    assert not torch.equal(found[0], case.pairs[1, 0])
    case = drawn((129, 129, 32), heads=1)
    assert torch.equal(pairs_of_flashinfer(to_flashinfer(case.mask, 3), 129, 129), case.pairs[0].expand(3, -1, -1))


@pytest.mark.parametrize(
    ("shape", "offset", "serves"),
    [((129, 129, 32), None, True), ((40, 72, 32), None, True), ((64, 128, 32), 32, True), ((64, 128, 32), 7, False)],
)
def test_causality_of_a_bsr_row_is_that_of_its_last_block_where_row_0_begins_a_block(shape, offset, serves):
    q_len, kv_len, size = shape
    case = drawn(shape, offset=offset)
    blocks = to_bsr(case.mask, head=1)
    pairs = torch.zeros(blocks.shape, dtype=torch.bool)
    for i, (first, end) in enumerate(itertools.pairwise(blocks.indptr.tolist())):
        keys = (blocks.indices[first:end, None].long() * size + torch.arange(size)).flatten()
        row = torch.arange(size)[:, None]
        pairs[i * size : (i + 1) * size, keys] = torch.arange(len(keys)) <= row + len(keys) - size
    assert torch.equal(pairs[:q_len, :kv_len], case.pairs[0, 1]) is serves


def test_exports_need_no_default_device():
    case, flashinfer, bsr = drawn((50, 129, 32)), partial(to_flashinfer, num_kv_heads=3), partial(to_bsr, with_pairs=True)
    exports = (to_block_map, to_index_list, to_flash_attn, flashinfer, bsr)
    expected = [export(case.mask) for export in exports]
    with torch.device("meta"):
        found = [export(case.mask) for export in exports]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_maps_and_lists_read_no_value():
    with FakeTensorMode():
        query, key = torch.empty(1, 2, 50, 16), torch.empty(1, 2, 129, 16)
        mask = causal_mask(query, key, block_size=32)
        assert to_block_map(mask).shape == to_index_list(mask)[0].shape == to_flash_attn(mask).full_block_idx.shape
        # what reads one fails here
        with pytest.raises(DataDependentOutputException):
            to_flashinfer(mask, 1)


ON_GPU = [pytest.param("flashinfer", f"flashinfer-{name}", 128, marks=pytest.mark.slow) for name in ("fa3", "fa2")]
ON_GPU += [pytest.param("flash_attn.cute", "flash-attn-4", head_dim) for head_dim in (64, 128, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize(("package", "kernel", "head_dim"), ON_GPU)
def test_kernels_compute_the_kept_pairs_and_planted_faults_are_caught(package, kernel, head_dim):
    pytest.importorskip(package)
    from bench.speed import export_kernels

    found = {row["what"]: str(row["value"]) for row in export_kernels.checks([kernel], [head_dim])}
    planted = {name: outcome for name, outcome in found.items() if name != kernel}
    assert found[kernel].startswith("right"), found
    assert len(planted) == 2 and all(outcome.startswith("caught") for outcome in planted.values()), found
