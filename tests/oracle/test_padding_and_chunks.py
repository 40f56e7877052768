"""The oracle under padding, on chunks, and on partly filled caches."""

import math
from typing import Any

import pytest
import torch

from tests.oracle.by_hand import BLOCK, NEVER, blocks, decide, random_inputs
from tests.oracle.reference import reference


def test_row_of_padding_keeps_nothing():
    query, key = random_inputs(6, 64, 64, batch=2)
    attention_mask = torch.tensor([[0] * 64, [1] * 64])
    options: dict[str, Any] = {"gamma": 0.5, "tau": 1.0, "block_size": BLOCK, "min_budget": 32}
    result = reference(query, key, attention_mask=attention_mask, **options)
    assert not result.keep[0].any()
    assert not result.full[0].any()
    assert not result.is_query_aware[0].any()
    for name in ("js_distance", "density", "coverage", "num_vertical_blocks", "vertical"):
        assert (getattr(result, name)[0] == 0).all()
    assert (result.margin[0] == math.inf).all()
    alone = reference(query[1:], key[1:], **options)
    assert torch.equal(result.keep[1:], alone.keep)
    assert torch.equal(result.margin[1:], alone.margin)


def test_chunk_inside_a_block_lies_on_two_diagonals():
    # Rows at positions 40 to 71: query block 0 spans key blocks 2 and 3, query block 1 spans 3 and 4.
    scores = torch.full((32, 72), NEVER)
    for row in range(32):
        scores[row, 40 + row - 32] = 0.0
    result = decide(scores, gamma=0.5)
    assert result.slash[0, 0].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    # The last 16 rows attend to keys 24 to 39, half in block 1 and half in block 2: the lower wins the tie.
    forced = {(0, 0), (0, 2), (0, 3), (1, 0), (1, 3), (1, 4)}
    assert blocks(result) == forced | {(0, 1), (1, 1)} | {(0, 0), (0, 1), (1, 1), (1, 2)}


@pytest.mark.parametrize("q_offset", [24, torch.tensor(24), torch.tensor([24, 16])], ids=["int", "0-d", "batch"])
def test_unfilled_keys_do_not_exist(q_offset):
    query, key = random_inputs(10, 40, 100, batch=2)
    options: dict[str, Any] = {"gamma": 0.7, "tau": 0.2, "block_size": BLOCK, "min_budget": BLOCK}
    result = reference(query, key, q_offset=q_offset, **options)
    for b, offset in enumerate(torch.as_tensor(q_offset).expand(2).tolist()):
        filled = offset + 40
        shorter = reference(query[b : b + 1], key[b : b + 1, :, :filled], **options)
        num_kv_blocks = shorter.keep.shape[-1]
        assert torch.equal(result.keep[b, :, :, :num_kv_blocks], shorter.keep[0])
        assert not result.keep[b, :, :, num_kv_blocks:].any()
        assert torch.allclose(result.js_distance[b], shorter.js_distance[0], rtol=1e-12)
