"""Rows that do not decide: right padding that no mask tells of. A prompt keeps the blocks that it keeps alone.

The kernels are compared with the plain search in `tests/kernels/test_search.py`.
"""

from __future__ import annotations

import pytest
import torch

from flexmask import FlexPrefillConfig
from flexmask.base.inputs import attention_inputs
from flexmask.reference.flexprefill import reference_flexprefill
from flexmask.search import search
from tests.cases import structured_inputs

LENGTHS = (160, 90, 64, 7)  # tokens of the prompts, in blocks of 16
BLOCK = 16
CASES = {
    "flatten": {},
    "per_query": {"query_aware": "per_query"},
    "query-aware": {"tau": 1.0},
    "vertical-slash": {"tau": 0.0, "min_budget": 40},
    "middle": {"index_queries": "middle", "pattern_queries": "middle"},
    "capped": {"tau": 0.5, "max_budget": 48},
    "everything, capped": {"gamma": 1.0, "max_budget": 48},
    "everything": {"gamma": 1.0},
    "window and soft cap": {"scores": {"window": 50, "softcap": 20.0}},
    "chunk": {"offset": 48},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prompt_keeps_the_blocks_that_it_keeps_alone(case):
    case = dict(case)
    scores, offset = case.pop("scores", {}), case.pop("offset", 0)
    options = {"gamma": 0.5, "tau": 0.3, "block_size": BLOCK, "min_budget": 0, **case}
    config = FlexPrefillConfig(**options)
    generator = torch.Generator().manual_seed(1)
    query, key = structured_inputs(generator, len(LENGTHS), 4, 2, 160, 160 + offset, 32, sharpness=5.0)
    inputs = attention_inputs(query, key, q_offset=offset or None, **scores).placed()
    found = search(inputs._replace(deciding=torch.tensor(LENGTHS)), config, with_stats=True, with_keep=True)
    all_decide = search(inputs, config, with_stats=True, with_keep=True)
    differs, query_aware = 0, 0
    for row, length in enumerate(LENGTHS):
        prompt = query[row : row + 1, :, :length], key[row : row + 1, :, : offset + length]
        alone = reference_flexprefill(*prompt, **options, **scores)
        rows, columns = alone.keep.shape[2:]
        assert torch.equal(found.keep[row, :, :rows, :columns], alone.keep[0]), length
        if options["gamma"] < 1:
            assert torch.equal(found.stats[0][row], alone.is_query_aware[0])
        if not (options["gamma"] == 1 and "max_budget" not in options):
            # pooled keys of a block that the prompt fills in part are its own
            torch.testing.assert_close(found.stats[1][row].double(), alone.js_distance[0], atol=1e-5, rtol=1e-4)
        differs += int((all_decide.keep[row, :, :rows, :columns] != alone.keep[0]).sum())
        query_aware += int(alone.is_query_aware.sum())
    assert torch.equal(found.keep[0], all_decide.keep[0])
    # every row attends, to no more than it may
    assert found.keep.any(-1).all()
    if config.gamma == 1 and config.max_budget is None:
        assert torch.equal(found.keep, all_decide.keep)
    else:
        assert differs > 0, "the padding would not have changed anything"
        assert (query_aware > 0) == (config.tau > 0)
    lists = found.lists
    assert torch.equal(lists.kv_num_blocks + lists.full_kv_num_blocks, found.keep.sum(-1))


def test_published_selection_knows_no_padding():
    query, key = structured_inputs(torch.Generator().manual_seed(1), 2, 4, 2, 160, 160, 32)
    config = FlexPrefillConfig(0.5, block_size=BLOCK, min_budget=0, selection="reference")
    inputs = attention_inputs(query, key)
    expected = search(inputs, config, with_keep=True)
    found = search(inputs._replace(deciding=torch.tensor([160, 90])), config, with_keep=True)
    assert torch.equal(found.keep, expected.keep)
