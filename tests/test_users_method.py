"""A user's mask function in sparse_attention: wrong masks are refused by name, others limited to what the call shows."""

import functools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexmask import sparse_attention
from flexmask._torch import KNOWS_LENGTHS, SLICED_MASK_MOD
from flexmask.flex.block_mask import block_mask_from_lists
from flexmask.mask_function import method as decorated
from tests.comparisons import assert_same_attention
from tests.compile_support import recompilations
from tests.expected import masked_attention, seen_pairs
from tests.export.selections import over_tokens

BLOCK, LENGTH, BLOCKS = 16, 100, 7
QUERY, KEY, VALUE = (torch.randn(2, heads, LENGTH, 32, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
PADDED: dict[str, Any] = {"attention_mask": torch.arange(LENGTH)[None] >= torch.tensor([[0], [23]]), "window": 90}


def every_pair(b, h, q_idx, kv_idx):
    return kv_idx >= 0


def counts(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int32)


def mask_of(kv_num_blocks, kv_indices, *full, size=BLOCK, lengths=(LENGTH, LENGTH), mod=every_pair):
    return block_mask_from_lists((kv_num_blocks, kv_indices, *(full or (None, None))), mod, size, lengths)


def attend(mask: object, method: Any = None, **options: Any) -> Any:

    def my_method(query, key, **given):
        return mask

    with torch.no_grad():
        return sparse_attention(QUERY, KEY, VALUE, method or my_method, block_size=BLOCK, dense_below=0, **options)


VISIBLE = torch.ones(2, 4, BLOCKS, BLOCKS, dtype=torch.bool)
WRONG_MAPS: list[tuple[Any, type[Exception], str]] = [
    (VISIBLE.int(), TypeError, "kept blocks as bool; got torch.int32"),
    ([True], TypeError, "a bool tensor of kept blocks, or None; got list"),
    (VISIBLE[:, :2], ValueError, "= (2 or 1, 4 or 1, 7, 7); got (2, 2, 7, 7)"),
    (VISIBLE[..., :-1], ValueError, "= (2 or 1, 4 or 1, 7, 7); got (2, 4, 7, 6)"),
    (VISIBLE[0], ValueError, "= (2 or 1, 4 or 1, 7, 7); got (4, 7, 7)"),
    (VISIBLE.repeat(2, 1, 1, 1), ValueError, "= (2 or 1, 4 or 1, 7, 7); got (4, 4, 7, 7)"),
    (VISIBLE.to("meta"), ValueError, "kept blocks on query's device cpu; got meta"),
]


@pytest.mark.parametrize(("kept", "error", "message"), WRONG_MAPS)
def test_a_wrong_map_of_kept_blocks_is_refused_by_the_methods_name(monkeypatch, kept, error, message):
    monkeypatch.setattr("flexmask.mask_function.METHODS", {})
    maps = []

    @decorated
    def latest_map_mask(problem):
        return maps[-1]

    for right in (VISIBLE, VISIBLE[:1, :1], None):
        maps.append(right)
        latest_map_mask(QUERY, KEY, block_size=BLOCK)
    maps.append(kept)
    for call in (lambda: latest_map_mask(QUERY, KEY, block_size=BLOCK), lambda: attend(None, latest_map_mask)):
        with pytest.raises(error, match=f"^method latest_map must return .*{re.escape(message)}$"):
            call()


COUNTS, INDICES = counts(1, 1, BLOCKS), torch.arange(BLOCKS, dtype=torch.int32).expand(1, 1, BLOCKS, BLOCKS).contiguous()
FEWER_ROWS = INDICES[:, :, : BLOCKS - 1]
THREE_HEADS = (counts(1, 3, BLOCKS), INDICES.expand(1, 3, -1, -1))


def of_heads(batch: int, heads: int) -> BlockMask:
    return mask_of(counts(batch, heads, BLOCKS), INDICES.expand(batch, heads, -1, -1).contiguous())


def with_mask_mod(mask_mod: Any) -> BlockMask:
    mask = of_heads(1, 4)[:, :1]
    mask.mask_mod = mask_mod
    return mask


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: None, TypeError, "a BlockMask; got NoneType"),
    (lambda: of_heads(1, 3), ValueError, "(2 or 1, 4 or 1, 7), a count for each query block; got (1, 3, 7)"),
    (lambda: mask_of(COUNTS, FEWER_ROWS), ValueError, "kv_indices of (1, 1, 7, ..), as kv_num_blocks is; got (1, 1, 6, 7)"),
    (
        lambda: mask_of(COUNTS, INDICES, *THREE_HEADS),
        ValueError,
        "full_kv_num_blocks of kv_num_blocks' shape (1, 1, 7); got (1, 3, 7)",
    ),
    (lambda: mask_of(COUNTS.float(), INDICES), TypeError, "kv_num_blocks of integers; got torch.float32"),
    (lambda: mask_of(COUNTS, INDICES, size=32), ValueError, "in blocks of 16 tokens, as it is told to; got (32, 32)"),
    (lambda: with_mask_mod(None), TypeError, "a mask with a mask_mod that can be called; got NoneType"),
    (lambda: mask_of(COUNTS.to("meta"), INDICES.to("meta")), ValueError, "kv_num_blocks on query's device cpu; got meta"),
]
if SLICED_MASK_MOD is not None:
    said = "a mask with its mask_mod, which slicing drops; set it again: part.mask_mod = whole.mask_mod"
    REFUSED.append((lambda: of_heads(1, 4)[:, :1], ValueError, said))
if KNOWS_LENGTHS:
    said = "a mask of (q_len, kv_len) = (100, 100); got (100, 112)"
    REFUSED.append((lambda: mask_of(COUNTS, INDICES, lengths=(LENGTH, 112)), ValueError, said))


@pytest.mark.attention
@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_a_mask_of_another_call_is_refused_by_the_methods_name(make, error, message):
    with pytest.raises(error, match=rf"^method my_method must return .*{re.escape(message)}$"):
        attend(make())


@pytest.mark.attention
def test_any_callable_has_a_name_in_the_message():
    class Generator:
        def __call__(self, query, key, **given):
            return None

    def gives_nothing(query, key, number=1, **given):
        return None

    for method, name in ((functools.partial(gives_nothing, number=2), "gives_nothing"), (Generator(), "Generator")):
        with pytest.raises(TypeError, match=f"^method {name} must return a BlockMask; got NoneType$"):
            attend(None, method)


NOTHING = torch.zeros(2, 4, BLOCKS, BLOCKS, dtype=torch.bool)
KEEP = torch.rand(2, 4, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(5)) < 0.5
SOME = KEEP & (torch.arange(BLOCKS) % 2 == 0)


def lists_of(keep: Tensor, dtype: torch.dtype = torch.int32, beyond: int = 0) -> tuple[Tensor, Tensor]:
    """Counts and indices, with `beyond` past the count."""
    order = keep.int().sort(dim=-1, descending=True, stable=True).indices
    number = keep.sum(-1)
    return number.to(dtype), torch.where(torch.arange(keep.shape[-1]) < number[..., None], order, beyond).to(dtype)


KEPT_COUNTS, KEPT_INDICES = lists_of(KEEP)
ENTRIES = 3  # of a list with less room than blocks
NARROW = KEEP & (KEEP.cumsum(-1) <= ENTRIES)
LISTS: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {
    "partial": ((KEPT_COUNTS, KEPT_INDICES), KEEP),
    "both": ((*lists_of(KEEP & ~SOME), *lists_of(SOME)), KEEP),
    "every block full": ((*lists_of(NOTHING), *lists_of(~NOTHING)), ~NOTHING),
    "a block in both lists": ((KEPT_COUNTS, KEPT_INDICES, *lists_of(SOME)), KEEP),
    "a block twice in a list": ((KEPT_COUNTS + (KEPT_COUNTS > 0), torch.cat([KEPT_INDICES[..., :1], KEPT_INDICES], -1)), KEEP),
    "narrow": ((lists_of(NARROW)[0], lists_of(NARROW)[1][..., :ENTRIES]), NARROW),
    "descending": ((KEPT_COUNTS, BLOCKS - 1 - lists_of(KEEP.flip(-1))[1]), KEEP),
    "int64": (lists_of(KEEP, torch.int64), KEEP),
    "large numbers past the count": (lists_of(KEEP, beyond=10**6), KEEP),
    "one head": (lists_of(KEEP[:, :1]), KEEP[:, :1]),
}


pairs_of = functools.partial(over_tokens, sizes=(BLOCK, BLOCK), lengths=(LENGTH, LENGTH))


def expected(pairs: Tensor) -> Tensor:
    """Dense attention under pairs by head and PADDED."""
    visible = seen_pairs(LENGTH, torch.zeros(2, dtype=torch.int64), PADDED["attention_mask"], PADDED["window"])
    return masked_attention(QUERY, KEY, VALUE, (pairs & visible[:, None]).expand(2, 4, -1, -1))[0]


@pytest.mark.attention
@pytest.mark.parametrize(("lists", "keep"), LISTS.values(), ids=LISTS)
def test_lists_of_any_layout_keep_their_blocks_and_nothing_hidden(lists, keep):
    out = attend(mask_of(*lists), **PADDED)
    assert_same_attention(out, expected(pairs_of(keep)))
    with pytest.raises(AssertionError, match="not close"):  # later positions and padding would show
        assert_same_attention(out, masked_attention(QUERY, KEY, VALUE, pairs_of(keep).expand(2, 4, -1, -1))[0])


@pytest.mark.attention
def test_a_sliced_mask_serves_with_its_mask_mod_set_again():
    assert torch.equal(attend(with_mask_mod(every_pair)), attend(of_heads(1, 1)))


@pytest.mark.attention
def test_a_mask_of_create_block_mask_that_sees_the_future_is_causal():
    reach = 40

    def both_ways(query, key, *, block_size, **given):
        # a partial has no __name__
        mod = functools.partial(lambda b, h, q_idx, kv_idx, reach: (q_idx - kv_idx).abs() <= reach, reach=reach)
        return create_block_mask(mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=block_size)

    index = torch.arange(LENGTH)
    near = (index[:, None] - index).abs() <= reach
    assert_same_attention(attend(None, both_ways, **PADDED), expected(near[None, None]))


@pytest.mark.attention
def test_rows_of_a_chunk_see_no_later_key():
    q_len, offset = 40, torch.tensor([11, 50])

    def everything(query, key, **given):
        full = torch.ones(1, 1, -(-q_len // BLOCK), BLOCKS, dtype=torch.bool)
        return mask_of(*lists_of(~full), *lists_of(full), lengths=(q_len, LENGTH))

    rows = QUERY[:, :, :q_len]
    with torch.no_grad():
        out = sparse_attention(rows, KEY, VALUE, everything, block_size=BLOCK, dense_below=0, q_offset=offset)
    pairs = seen_pairs(q_len, offset, torch.ones(2, LENGTH, dtype=torch.bool), None)
    assert_same_attention(out, masked_attention(rows, KEY, VALUE, pairs[:, None].expand(-1, 4, -1, -1))[0])


@pytest.mark.attention
def test_a_function_sees_all_prompts_and_heads_whatever_memory_masks_may_take():
    reach = torch.tensor([[5, 60, 17, 90], [33, 8, 70, 21]])

    def near_by_head(query, key, **given):
        heads.append(tuple(query.shape[:2]))
        return mask_of(*lists_of(KEEP[:1, :1]), mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx < reach[b, h])

    heads = []
    index = torch.arange(LENGTH)
    pairs = pairs_of(KEEP[:1, :1]) & (index[:, None] - index < reach[..., None, None])
    for limit in ({}, {"max_mask_bytes": 1}):
        assert_same_attention(attend(None, near_by_head, **PADDED, **limit), expected(pairs))
    assert heads == [(2, 4)] * 2


class Near:
    def __init__(self, reach: Any) -> None:
        self.reach = reach

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.reach


def in_closure(reach):
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < reach


def in_dict(reach):
    options = {"least": 0, "reach": [reach]}
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < options["reach"][0]


CAPTURED = (in_closure, Near, in_dict)


def attend_near(make: Any, reach: float, length: int = LENGTH) -> Tensor:
    """Attention of a causal prompt to `reach` keys, by a mask_mod that captures the number."""

    def near(query, key, *, block_size, **given):
        return create_block_mask(make(reach), None, None, length, length, device="cpu", BLOCK_SIZE=block_size)

    query, key, value = (torch.randn(1, 2, length, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    with torch.no_grad():
        out = sparse_attention(query, key, value, near, block_size=BLOCK, dense_below=0)
    visible = seen_pairs(length, torch.zeros(1).long(), torch.ones(1, length).bool(), math.ceil(reach))
    assert_same_attention(out, masked_attention(query, key, value, visible[:, None].expand(-1, 2, -1, -1))[0])
    return out


@pytest.mark.attention
@pytest.mark.parametrize(
    ("make", "reaches", "lengths"),
    [
        *((make, (20, 30, 40), (60, 90, 120)) for make in CAPTURED),
        *(pytest.param(make, (20.0, 30.0, 40.0), (60, 90, 120), marks=pytest.mark.slow) for make in (in_closure, Near)),
        # numbers that no other test captures
        (in_closure, (41, 42.5, 43), (LENGTH,) * 3),
        pytest.param(in_closure, (33,) * 3, (60, 75, 90), marks=pytest.mark.slow),
    ],
)
def test_captured_numbers_may_change_without_a_limit_of_recompilations(make, reaches, lengths):
    with recompilations(2):
        for reach, length in zip(reaches, lengths, strict=True):
            attend_near(make, reach, length)
