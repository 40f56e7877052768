"""Every export says what the mask says, pair by pair."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from flexmask import flexprefill_mask
from flexmask.block_masks import causal_mask
from flexmask.export import to_block_map, to_bsr, to_flash_attn, to_flashinfer, to_index_list
from tests.export.selections import LONG, SHAPES, drawn

GEOMETRIES = {"causal": {}, "window": {"window": 20}, "padded": {"padded": True, "batch": 2}, "empty heads": {"empty": (0, 2)}}
ALL = [
    pytest.param(shape, geometry, id=f"{name}, {kind}") for name, shape in SHAPES.items() for kind, geometry in GEOMETRIES.items()
]
CAUSAL = [pytest.param(shape, {}, id=name) for name, shape in {**SHAPES, **LONG}.items()]
CAUSAL += [pytest.param((50, 129, 32), {"offset": 7}, id="offset"), pytest.param((129, 129, 32), {"empty": (1,)}, id="empty")]


def pairs_of_lists(case, lists, columns):
    """Pairs of flash-attn-4's lists: full blocks whole, others by visibility."""
    batch, heads = len(case.kept), len(case.kept[0])
    pairs = torch.zeros(batch, heads, case.q_len, case.kv_len, dtype=torch.bool)
    counts, indices, full_counts, full_indices, (rows, keys) = lists
    assert keys == columns
    for b in range(batch):
        for h in range(heads):
            for i in range(counts.shape[2]):
                listed = [(j, False) for j in indices[b, h, i, : counts[b, h, i]].tolist()]
                listed += [(j, True) for j in full_indices[b, h, i, : full_counts[b, h, i]].tolist()]
                assert len({j for j, _ in listed}) == len(listed)
                for j, is_full in listed:
                    assert 0 <= j * keys < case.kv_len
                    for row in range(i * rows, min((i + 1) * rows, case.q_len)):
                        for key in range(j * keys, min((j + 1) * keys, case.kv_len)):
                            pairs[b, h, row, key] = is_full or case.sees(b, row, key)
    return pairs


@pytest.mark.parametrize(("shape", "geometry"), ALL)
def test_map_and_index_list_hold_the_kept_blocks(shape, geometry):
    case = drawn(shape, **geometry)
    for dtype in (torch.bool, torch.uint8, torch.int32):
        found = to_block_map(case.mask, dtype=dtype)
        assert found.dtype == dtype and found.is_contiguous()
        assert found.bool().tolist() == case.kept
    indices, counts = to_index_list(case.mask)
    assert indices.dtype == counts.dtype == torch.int32
    for prompt, heads in enumerate(case.kept):
        for head, rows in enumerate(heads):
            for i, row in enumerate(rows):
                expected = [j for j, is_kept in enumerate(row) if is_kept]
                assert indices[prompt, head, i].tolist() == expected + [-1] * (len(row) - len(expected))
                assert counts[prompt, head, i] == len(expected)


@pytest.mark.parametrize(("shape", "geometry"), ALL)
def test_flash_lists_give_the_pairs(shape, geometry):
    case = drawn(shape, **geometry)
    pairs = case.pairs()
    assert torch.equal(pairs_of_lists(case, to_flash_attn(case.mask), shape[2]), pairs)
    tile = shape[2] // 2
    assert torch.equal(pairs_of_lists(case, to_flash_attn(case.mask, kv_tile=tile), tile), pairs)


@pytest.mark.parametrize(("shape", "geometry"), ALL)
def test_bsr_gives_the_pairs(shape, geometry):
    case = drawn(shape, **geometry)
    expected, size = case.pairs(), shape[2]
    for prompt in range(len(case.kept)):
        for head in range(3):
            blocks = to_bsr(case.mask, head=head, row=prompt, with_pairs=True)
            pairs = torch.zeros(blocks.shape, dtype=torch.bool)
            for i in range(len(blocks.indptr) - 1):
                entries = range(int(blocks.indptr[i]), int(blocks.indptr[i + 1]))
                columns = [int(blocks.indices[entry]) for entry in entries]
                assert columns == sorted(set(columns))
                for entry, j in zip(entries, columns, strict=True):
                    pairs[i * size : (i + 1) * size, j * size : (j + 1) * size] = blocks.mask[entry]
            assert torch.equal(pairs[: case.q_len, : case.kv_len], expected[prompt, head])
            assert not pairs[case.q_len :].any() and not pairs[:, case.kv_len :].any()


def pairs_of_flashinfer(blocks, q_len, kv_len):
    """Pairs that FlashInfer's kernel computes: causality counts from the end of the gathered keys."""
    heads = blocks.block_mask_map.shape[0]
    assert blocks.causal
    assert blocks.block_row_sz.sum(-1).tolist() == [q_len] * heads and blocks.block_col_sz.sum(-1).tolist() == [kv_len] * heads
    assert int(blocks.block_col_sz.min()) > 0
    pairs = torch.zeros(heads, q_len, kv_len, dtype=torch.bool)
    for head in range(heads):
        first_row = 0
        for i, rows in enumerate(blocks.block_row_sz[head].tolist()):
            gathered, first_key = [], 0
            for j, keys in enumerate(blocks.block_col_sz[head].tolist()):
                if blocks.block_mask_map[head, i, j]:
                    gathered += range(first_key, first_key + keys)
                first_key += keys
            for row in range(rows):
                for place, key in enumerate(gathered):
                    pairs[head, first_row + row, key] = place <= row + len(gathered) - rows
            first_row += rows
    return pairs


@pytest.mark.parametrize(("shape", "geometry"), CAUSAL)
def test_flashinfer_gathers_the_pairs(shape, geometry):
    case = drawn(shape, **geometry)
    found = pairs_of_flashinfer(to_flashinfer(case.mask, 3), *shape[:2])
    assert torch.equal(found, case.pairs()[0])


def test_flashinfer_serves_one_prompt_of_many_and_merges_heads():
    case = drawn((50, 129, 32), heads=4, batch=2)
    expected = case.pairs()[1].unflatten(0, (2, 2)).any(1)
    found = pairs_of_flashinfer(to_flashinfer(case.mask, 2, row=1, merge_heads=True), 50, 129)
    assert torch.equal(found, expected)
    assert not torch.equal(found[0], case.pairs()[1, 0])


def test_a_shared_map_serves_all_heads():
    case = drawn((129, 129, 32), heads=1)
    assert torch.equal(pairs_of_flashinfer(to_flashinfer(case.mask, 3), 129, 129), case.pairs()[0].expand(3, -1, -1))


def test_methods_masks_are_exported():
    torch.manual_seed(0)
    query, key = 3 * torch.randn(1, 4, 100, 16), 3 * torch.randn(1, 2, 130, 16)
    mask = flexprefill_mask(query, key, gamma=0.5, block_size=16, min_budget=0)
    assert to_block_map(mask).sum() < to_block_map(causal_mask(query, key, block_size=16)).expand(1, 4, -1, -1).sum()
    pairs = mask.mask_mod(*torch.meshgrid(*map(torch.arange, (1, 4, 100, 130)), indexing="ij"))
    assert torch.equal(pairs_of_flashinfer(to_flashinfer(mask, 4), 100, 130), pairs[0])
    lists = to_flash_attn(mask)
    assert torch.equal(lists.mask_block_cnt, mask.kv_num_blocks) and torch.equal(lists.full_block_cnt, mask.full_kv_num_blocks)


def shifted(lists):
    """An index off by one."""
    indices = lists.mask_block_idx.clone()
    indices[0, 0, -1, 0] -= 1
    return lists._replace(mask_block_idx=indices)


def diagonal_in_full(lists):
    counts, full = lists.mask_block_cnt.clone(), lists.full_block_cnt.clone()
    full_indices = lists.full_block_idx.clone()
    full_indices[0, 0, -1, full[0, 0, -1]] = lists.mask_block_idx[0, 0, -1, 0]
    counts[0, 0, -1] -= 1
    full[0, 0, -1] += 1
    return lists._replace(mask_block_cnt=counts, full_block_cnt=full, full_block_idx=full_indices)


# row 2 of this seed keeps blocks 0 and 2
SPARSE = 3


@pytest.mark.parametrize("fault", [shifted, diagonal_in_full])
def test_planted_faults_change_the_pairs(fault):
    case = drawn((96, 96, 32), heads=1, seed=SPARSE)
    assert case.kept[0][0][2] == [True, False, True]
    lists = to_flash_attn(case.mask)
    assert torch.equal(pairs_of_lists(case, lists, 32), case.pairs())
    assert not torch.equal(pairs_of_lists(case, fault(lists), 32), case.pairs())


def test_maps_and_lists_read_no_value():
    with FakeTensorMode():
        query, key = torch.empty(1, 2, 50, 16), torch.empty(1, 2, 129, 16)
        mask = causal_mask(query, key, block_size=32)
        assert to_block_map(mask).shape == to_index_list(mask)[0].shape == to_flash_attn(mask).full_block_idx.shape
        # what reads one fails here
        with pytest.raises(DataDependentOutputException):
            to_flashinfer(mask, 1)
