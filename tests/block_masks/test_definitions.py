"""Every method equals its definition: whole, in chunks, in slices, next to heads that are not finite."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flexmask import METHODS, select
from tests.block_masks.definition_call import make_call
from tests.block_masks.definitions import DEFINITIONS, TESTED
from tests.block_masks.gallery import MASKS, SPARSE
from tests.cases import structured_inputs
from tests.expected import by_block, seen_pairs

SIZE = 16
MARGIN = 1e-5
# by case: q_len, kv_len, offsets or None, window, padding, scores
CASES: dict[str, tuple[int, int, tuple[int, int] | None, int | None, str | None, dict[str, Any]]] = {
    "whole": (128, 128, None, None, None, {}),
    "ragged": (103, 103, None, None, None, {"softcap": 3.0}),
    "one row": (1, 63, None, None, None, {}),
    "chunk": (64, 150, None, None, None, {"scale": 0.4}),
    "offsets, window and left padding": (60, 130, (37, 70), 75, "left", {}),
    "right padding": (129, 129, None, None, "right", {"softcap": 5.0}),
    "holes and window": (110, 110, None, 60, "holes", {}),
}
CHOICES = [(name, options) for name in DEFINITIONS for options in (TESTED[name].sparse, *TESTED[name].others)]
# methods whose rows decide for themselves
BY_ROW = ("causal", "flash_prefill", "hip", "infllm", "lm_infinite", "oracle", "streaming_llm", "xattention")


def inputs_of(case: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Query, key and shared keywords."""
    q_len, kv_len, offsets, window, padding, scores = CASES[case]
    query, key = structured_inputs(torch.Generator().manual_seed(3), 2, 2, 1, q_len, kv_len, 32, sharpness=2.0)
    mask = None
    if padding is not None:
        slot = torch.arange(kv_len)
        left, right = slot >= torch.tensor([[20], [53]]), slot < torch.tensor([[kv_len - 3], [kv_len - 41]])
        holes = (slot % 7 != 3) & (slot >= torch.tensor([[5], [0]])) & ((slot < 40) | (slot > 60))
        mask = {"left": left, "right": right, "holes": holes}[padding]
    offset = None if offsets is None else torch.tensor(offsets)
    return query, key, {"window": window, "attention_mask": mask, "q_offset": offset, **scores}


def expected_of(name: str, query: Tensor, key: Tensor, shared: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Visible blocks by definition, and the rows that have a margin."""
    q_len, kv_len = query.shape[2], key.shape[2]
    offsets = torch.full((2,), kv_len - q_len) if shared["q_offset"] is None else shared["q_offset"]
    is_token = torch.ones(2, kv_len, dtype=torch.bool) if shared["attention_mask"] is None else shared["attention_mask"]
    pairs = seen_pairs(q_len, offsets, is_token, shared["window"])
    scores = {option: value for option, value in shared.items() if option in ("window", "scale", "softcap")}
    keep, margin = DEFINITIONS[name](make_call(query, key, pairs, offsets, is_token, SIZE, **scores), **options)
    position = offsets[:, None] + torch.arange(q_len)
    own = by_block(torch.arange(kv_len) // SIZE == (position // SIZE)[:, :, None], SIZE)
    visible = by_block(pairs, SIZE)[:, None]
    return (keep | own[:, None]) & visible, (margin > MARGIN) | ~visible.any(-1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "options"), CHOICES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CHOICES)])
def test_keeps_the_blocks_of_its_definition(name, options, case):
    query, key, shared = inputs_of(case)
    got = MASKS[name](query, key, block_size=SIZE, **shared, **options).to_dense().bool().expand(2, 2, -1, -1)
    expected, clear = expected_of(name, query, key, shared, options)
    assert clear.float().mean() > 0.9, "too many rows are close calls for the comparison to say much"
    wrong = ((got != expected) & clear[..., None]).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} blocks differ, the first at {wrong[0].tolist()}"


@pytest.mark.parametrize("name", BY_ROW)
def test_mask_of_a_chunk_is_the_rows_of_the_whole(name):
    query, key = structured_inputs(torch.Generator().manual_seed(5), 2, 2, 1, 192, 192, 32, sharpness=2.0)
    options = {**SPARSE[name], **({"last_blocks": 0} if name == "flash_prefill" else {}), "block_size": SIZE}
    whole = MASKS[name](query, key, **options).to_dense()
    for start, stop in ((0, 64), (64, 160), (160, 192)):
        chunk = MASKS[name](query[:, :, start:stop], key, q_offset=start, **options).to_dense()
        assert torch.equal(chunk, whole[:, :, start // SIZE : stop // SIZE])


@pytest.mark.parametrize("case", ["whole", "offsets, window and left padding", "right padding"])
@pytest.mark.parametrize("name", [name for name in DEFINITIONS if METHODS[name].row_numbers])
def test_slices_of_rows_change_nothing(name, case, monkeypatch):
    query, key, shared = inputs_of(case)
    options = {**SPARSE[name], "block_size": SIZE, **shared}
    expected = MASKS[name](query, key, **options).to_dense()
    monkeypatch.setattr(select, "MOST_NUMBERS", 1)
    assert torch.equal(MASKS[name](query, key, **options).to_dense(), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("infllm", "causal")])
def test_a_head_that_is_not_finite_spoils_no_other(name, bad):
    query, key = structured_inputs(torch.Generator().manual_seed(5), 2, 4, 2, 112, 112, 32, sharpness=2.0)
    options = {**SPARSE[name], "block_size": SIZE}
    expected = MASKS[name](query, key, **options).to_dense()
    query[0, 1, 50:60] = bad
    got = MASKS[name](query, key, **options).to_dense()
    heads = [h for h in range(expected.shape[1]) if h != 1] if expected.shape[1] > 1 else [0]
    assert torch.equal(got[0, heads], expected[0, heads])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("name", [name for name in MASKS if name != "published"])  # which takes no padding
def test_what_padding_holds_does_not_matter(name):
    query, key, shared = inputs_of("right padding")
    expected = MASKS[name](query, key, block_size=SIZE, **SPARSE[name], **shared).to_dense()
    hidden = ~shared["attention_mask"][:, None, :, None]
    query, key = query.masked_fill(hidden, float("nan")), key.masked_fill(hidden, float("inf"))
    assert torch.equal(MASKS[name](query, key, block_size=SIZE, **SPARSE[name], **shared).to_dense(), expected)
