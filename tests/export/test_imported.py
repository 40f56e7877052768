"""Maps and lists that other code selected as masks, and what is refused."""

from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from flexmask.base.selection import Selection, block_lists, listed_blocks
from flexmask.export import from_block_map, from_index_list, to_block_map, to_bsr, to_flash_attn, to_flashinfer, to_index_list
from flexmask.flex.block_mask import block_mask, inputs_of_mask
from tests.comparisons import dense_map
from tests.compile_support import assert_same_lists
from tests.expected import by_block
from tests.export.selections import SHAPES, drawn


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("geometry", [{}, {"window": 20}, {"padded": True, "batch": 2}, {"empty": (1,)}], ids=str)
def test_imported_mask_allows_the_pairs(shape, geometry):
    case = drawn(shape, **geometry)
    assert torch.equal(create_mask(case.mask.mask_mod, *case.pairs.shape, device="cpu"), case.pairs)
    full = dense_map(case.mask.full_kv_num_blocks, case.mask.full_kv_indices)
    assert torch.equal(full, case.keep & by_block(case.visible, shape[2], every=True))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_lists_in_any_order_come_back(shape):
    case = drawn(shape, empty=(2,))
    indices, counts = to_index_list(case.mask, fill=99999)
    place, last = torch.arange(indices.shape[-1]), counts[..., None] - 1
    backwards = indices.gather(-1, torch.where(place <= last, last - place, place))
    assert_same_lists(from_index_list(backwards, counts, *shape[:2], block_size=shape[2]), case.mask)


def test_numbers_may_be_numpys():
    shape = (50, 129, 32)
    case, number = drawn(shape, offset=7, window=200), np.int64
    given = {"block_size": number(32), "window": number(200), "q_offset": number(7)}
    for mask in (
        from_block_map(case.keep, number(50), number(129), **given),
        from_index_list(*to_index_list(case.mask), number(50), number(129), **given),
    ):
        assert_same_lists(mask, case.mask)
        assert {type(x) for x in (*mask.BLOCK_SIZE, *mask.shape[2:])} == {int}
        assert torch.equal(create_mask(mask.mask_mod, *case.pairs.shape, device="cpu"), case.pairs)
        assert type(to_flash_attn(mask, kv_tile=number(16)).block_size[1]) is int


KEPT = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]])[None, None]


def with_entry(i, j, value):
    kept = KEPT.clone()
    kept[0, 0, i, j] = value
    return kept


@pytest.mark.parametrize(
    ("block_map", "changes", "error", "words"),
    [
        (with_entry(1, 2, 1), {}, ValueError, "keeps key block 2, which no row of query block 1 sees"),
        (with_entry(1, 1, 0), {}, ValueError, "lacks the diagonal, key block 1, for query block 1"),
        (KEPT[..., :2], {}, ValueError, r"block_map must be \(batch, num_heads, 3, 3\)"),
        (KEPT[0], {}, ValueError, r"got \(1, 3, 3\)"),
        (KEPT.float(), {}, TypeError, r"bool or integers; got torch\.float32"),
        (KEPT, {"kv_len": 64}, ValueError, "q_len must be at most kv_len = 64; got 96"),
        (KEPT, {"q_offset": 1}, ValueError, "q_offset must be in \\[0"),
        (KEPT, {"attention_mask": torch.ones(1, 95).bool()}, ValueError, r"attention_mask must be \(1, 96\); got \(1, 95\)"),
    ],
    ids=["later", "no diagonal", "columns", "dimensions", "floats", "length", "offset", "padding"],
)
def test_wrong_maps_are_refused(block_map, changes, error, words):
    with pytest.raises(error, match=words):
        from_block_map(block_map, **{"q_len": 96, "kv_len": 96, "block_size": 32, **changes})


@pytest.mark.parametrize(
    ("indices", "counts", "words"),
    [
        ([[0, 0], [0, 1], [1, 3]], [1, 2, 2], "outside 0 to 2"),
        ([[0, 0], [0, 1], [-1, 2]], [1, 2, 2], "outside 0 to 2"),
        ([[0, 0], [1, 1], [1, 2]], [1, 2, 2], "lists key block 1 twice for query block 1"),
        ([[0, 0], [0, 2], [1, 2]], [1, 2, 2], "key block 2, which no row of query block 1 sees"),
        ([[0, 0], [0, 0], [1, 2]], [1, 1, 2], "lacks the diagonal"),
        ([[0, 0], [0, 1], [1, 2]], [1, 3, 2], "has a count outside 0 to 2 for query block"),
        ([[0, 0], [0, 1], [1, 2]], [-1, 2, 2], "has a count outside 0 to 2 for query block"),
        ([[0, 0], [0, 1], [1, 2]], [1, 2], r"got \(1, 1, 3, 2\) and \(1, 1, 2\)"),
        ([[0, 0], [0, 1], [1, 2]], [True] * 3, r"counts must be a tensor of integers; got torch\.bool"),
    ],
)
def test_wrong_lists_are_refused(indices, counts, words):
    with pytest.raises(TypeError if counts[0] is True else ValueError, match=words):
        from_index_list(torch.tensor([[indices]]), torch.tensor([[counts]]), 96, 96, block_size=32)


def fake(tensor):
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


NO_VALUES = [
    (lambda x: x.tolist(), TypeError, "must be a tensor of .*integers; got list"),
    (lambda x: x.float(), TypeError, "must be a tensor of .*integers; got torch.float32"),
    (lambda x: x.to("meta"), ValueError, "must hold values; got a tensor on the meta device"),
    (fake, ValueError, "must be used under its FakeTensorMode; got a fake tensor"),
    (lambda x: x.to_sparse(), TypeError, "must be a plain tensor"),
]


@pytest.mark.parametrize("name", ["block_map", "attention_mask", "indices", "counts"])
@pytest.mark.parametrize(("change", "error", "words"), NO_VALUES)
def test_arguments_that_are_no_tensors_of_integers_are_refused_by_name(name, change, error, words):
    given = {"q_len": 96, "kv_len": 96, "block_size": 32, "attention_mask": torch.ones(1, 96).long()}
    of_lists = {"indices": torch.tensor([[[[0, 0], [0, 1], [1, 2]]]]), "counts": torch.tensor([[[1, 2, 2]]])}
    make, given = (from_index_list, given | of_lists) if name in of_lists else (from_block_map, given | {"block_map": KEPT})
    make(**given)
    with pytest.raises(error, match=f"^{name} {words}"):
        make(**{**given, name: change(given[name])})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16])
def test_lists_of_a_narrow_dtype_may_have_more_entries_than_it_counts(dtype):
    counts, indices = torch.ones(1, 1, 1).to(dtype), torch.zeros(1, 1, 1, 300).to(dtype)
    found = from_index_list(indices, counts, 16, 16 * 300, block_size=16, q_offset=0)
    assert to_block_map(found).nonzero().tolist() == [[0, 0, 0, 0]]
    assert torch.equal(listed_blocks(counts, indices, 300), to_block_map(found))


@pytest.mark.parametrize(
    ("fill", "error"), [(0.5, TypeError), (True, TypeError), (2**31, ValueError), (-(2**31) - 1, ValueError)]
)
def test_a_fill_that_is_no_int32_is_refused(fill, error):
    mask = from_block_map(KEPT, 96, 96, block_size=32)
    with pytest.raises(error, match=r"^fill must "):
        to_index_list(mask, fill=fill)
    assert to_index_list(mask, fill=2**31 - 1)[0].dtype == torch.int32


@pytest.mark.parametrize(
    ("geometry", "export", "options", "error", "words"),
    [
        ({"window": 20}, to_flashinfer, {"num_kv_heads": 3}, NotImplementedError, "the mask has window"),
        ({"padded": True}, to_flashinfer, {"num_kv_heads": 3}, NotImplementedError, "the mask has padding"),
        ({"batch": 2}, to_flashinfer, {"num_kv_heads": 3}, ValueError, "which of the mask's 2 prompts"),
        ({"batch": 2}, to_bsr, {"batch_index": 2}, ValueError, "batch_index must be from 0 to 1; got 2"),
        ({"batch": 2}, to_flashinfer, {"num_kv_heads": 3, "batch_index": 2}, ValueError, "batch_index must be from 0 to 1"),
        ({"heads": 4}, to_flashinfer, {"num_kv_heads": 2}, ValueError, "4 heads for 2: pass merge_heads=True"),
        ({"heads": 4}, to_flashinfer, {"num_kv_heads": 3}, ValueError, "num_kv_heads must divide"),
        ({"heads": 4}, to_bsr, {"head": 4}, ValueError, "head must be from 0 to 3; got 4"),
        ({}, to_flash_attn, {"kv_tile": 24}, ValueError, "kv_tile must divide the mask's block size 32; got 24"),
        ({}, to_block_map, {"dtype": torch.float32}, TypeError, r"dtype must be one of .*; got torch\.float32"),
    ],
)
def test_what_a_kernel_cannot_express_is_refused(geometry, export, options, error, words):
    with pytest.raises(error, match=words):
        export(drawn((129, 129, 32), **geometry).mask, **options)


def test_blocks_that_are_not_square_or_lack_a_diagonal_are_refused():
    mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, 128, 128, device="cpu", BLOCK_SIZE=(32, 64))
    with pytest.raises(ValueError, match=r"mask must have square blocks; got \(32, 64\)"):
        to_bsr(mask)
    keep = with_entry(1, 1, 0).bool()
    selection = Selection(block_lists(keep, torch.zeros(1, 3, 3).bool()), keep, {}, 32)
    mask = block_mask(inputs_of_mask(keep, (96, 96), None, None, None), selection)
    with pytest.raises(ValueError, match="block 1 of head 0 does not"):
        to_flashinfer(mask, 1)


@pytest.mark.parametrize(("export", "options"), [(to_flashinfer, {"num_kv_heads": 3}), (to_bsr, {"with_pairs": True})])
def test_a_mask_with_another_mask_mod_is_refused(export, options):
    mask = drawn((129, 129, 32)).mask
    mask.mask_mod = lambda b, h, q, k: k > 5
    with pytest.raises(NotImplementedError, match="unchanged"):
        export(mask, **options)


@pytest.mark.parametrize("export", [to_block_map, to_index_list, to_flash_attn, partial(to_flashinfer, num_kv_heads=1), to_bsr])
def test_only_masks_are_exported(export):
    with pytest.raises(TypeError, match="mask must be a BlockMask; got Tensor"):
        export(torch.zeros(1, 1, 2, 2))
