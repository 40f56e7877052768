"""A window of all tokens or more is none."""

from typing import Any

import pytest
import torch

from tests.attention_calls import padding
from tests.cases import mask_function, structured_inputs
from tests.comparisons import assert_honest, assert_same_stats
from tests.compile_support import assert_same_lists

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
    assert_same_stats(stats, none_stats)
