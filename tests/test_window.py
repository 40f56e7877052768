"""A window of all tokens or more is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexmask import flexprefill_mask
from flexmask.base.visibility import blocks_seen_by_rows, token_validity
from flexmask.block_masks import causal_mask
from tests.attention_calls import padding
from tests.cases import mask_function, structured_inputs
from tests.comparisons import assert_honest, same_values
from tests.compile_support import assert_same_lists
from tests.expected import by_block, seen_pairs

WINDOWS = (96, 192, 2**63 - 1)
PADDINGS: dict[str, dict[str, Any]] = {
    "left": {"attention_mask": padding(96, ("left", 48), ("left", 5))},
    "right": {"attention_mask": padding(96, ("right", 48), ("right", 5))},
    "holes, all": {"attention_mask": padding(96, ("holes", 7), ("all", 0))},
    "offset": {"q_offset": torch.tensor([0, 20])},
    "offset, padded": {"q_offset": torch.tensor([3, 20]), "attention_mask": padding(96, ("left", 48), ("holes", 7))},
}
SEARCHES: dict[str, dict[str, Any]] = {
    "everything kept": {"gamma": 1.0},
    "vertical-slash": {"gamma": 0.6, "tau": 0.0},
    "query-aware": {"gamma": 0.6, "tau": 1.0},
    "per query": {"gamma": 0.6, "tau": 1.0, "query_aware": "per_query"},
    "hybrid": {"method": "hybrid", "gamma": 0.6, "row_stride": 4},
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("where", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
def test_window_of_all_tokens_or_more_is_none(options, where, window):
    query, key = structured_inputs(torch.Generator().manual_seed(4), 2, 4, 2, 76 if "q_offset" in where else 96, 96, 32)
    given = {"block_size": 16, "min_budget": 0, "return_stats": True, **options, **where}
    make = mask_function(given.pop("method", "flexprefill"))
    (mask, stats), (none, none_stats) = (make(query, key, window=each, **given) for each in (window, None))
    assert_same_lists(mask, none)
    assert_honest(mask, (query.shape[2], 96))
    for name, value in vars(none_stats).items():
        assert same_values(torch.as_tensor(getattr(stats, name)), torch.as_tensor(value)), name


@pytest.mark.parametrize("window", WINDOWS)
def test_padding_is_not_kept_under_any_window(window):
    query, is_token = torch.randn(1, 2, 96, 16), padding(96, ("left", 48))
    visible = by_block(seen_pairs(96, torch.zeros(1, dtype=torch.int64), is_token != 0, window), 16)
    for make in (flexprefill_mask, causal_mask):
        options = {"gamma": 1.0} if make is flexprefill_mask else {}
        mask = make(query, query.clone(), block_size=16, window=window, attention_mask=is_token, **options)
        assert torch.equal(mask.to_dense().bool(), visible[:, None].expand(mask.shape[0], mask.shape[1], -1, -1))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("where", [("left", 48), ("holes", 7), ("all", 0)], ids=str)
def test_rows_see_no_padding_under_any_window(where, window):
    offset, is_token = torch.tensor([20]), padding(96, where)
    tokens = token_validity(76, 96, offset, is_token, is_token)
    found = blocks_seen_by_rows(20 + torch.arange(76)[None], tokens, 16, window)
    expected = by_block(seen_pairs(76, offset, is_token != 0, window).repeat_interleave(16, 1), 16)
    # only that of valid rows is defined
    assert torch.equal(found[tokens.row_valid], expected[tokens.row_valid])
