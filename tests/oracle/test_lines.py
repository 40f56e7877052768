"""The oracle's vertical-slash heads: line mass and top-p."""

import math

import pytest
import torch

from tests.oracle.by_hand import BLOCK, NEVER, blocks, decide, lines, planted_slash, random_inputs
from tests.oracle.reference import reference


def test_sink_gives_key_block_zero_and_its_diagonal():
    scores = torch.full((64, 64), NEVER)
    scores[:, 0] = 0.0
    result = decide(scores)
    assert result.vertical[0, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
    # The last 16 rows see key 0 at offsets 48 to 63: on average 1 - 7.5/16 of them on diagonal 3,
    # the rest on diagonal 4, which does not exist.
    assert result.slash[0, 0].tolist() == [0.0, 0.0, 0.0, 1 - 7.5 / 16]
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (1, 1)
    assert blocks(result) == lines(4, {0}, {3})
    assert result.density.item() == 7 / 10
    assert result.coverage.item() == 1.0


@pytest.mark.parametrize("shift", [0, 1, 5, 15])
def test_slash_is_split_over_two_diagonals(shift):
    result = decide(planted_slash(64, BLOCK + shift), gamma=0.95)
    expected = [0.0, 1 - shift / BLOCK, shift / BLOCK, 0.0]
    assert result.slash[0, 0].tolist() == pytest.approx(expected, abs=1e-12)
    # Rows 48 to 63 see keys 32 - shift to 47 - shift.
    expected = [0.0, shift / BLOCK, 1 - shift / BLOCK, 0.0]
    assert result.vertical[0, 0].tolist() == pytest.approx(expected, abs=1e-12)
    chosen = {1} if shift == 0 else {1, 2}
    assert result.num_slash_blocks.item() == len(chosen)
    assert blocks(result) == lines(4, {2} if shift == 0 else {1, 2}, chosen)


def test_slash_share_is_the_fraction_of_row_phases():
    query, key = random_inputs(0, 72, 72)
    result = reference(query, key, gamma=0.9, tau=0.0, block_size=BLOCK, min_budget=0)
    scores = (query[0, 0].double() @ key[0, 0].double().T) / 4
    p = torch.softmax(scores.masked_fill(~torch.ones(72, 72).tril().bool(), -math.inf), -1)[-16:]
    expected = [0.0] * 6
    for row in range(16):
        for column in range(72 - 16 + row + 1):
            offset = 56 + row - column
            for phase in range(BLOCK):
                expected[-((phase - offset) // BLOCK)] += p[row, column].item() / BLOCK / 16
    assert result.slash[0, 0].tolist() == pytest.approx(expected[:5], abs=1e-12)
    assert expected[5] > 1e-6
    assert sum(expected) == pytest.approx(1.0)
    assert result.vertical[0, 0].tolist() == pytest.approx([part.sum().item() / 16 for part in p.split(BLOCK, dim=1)], abs=1e-12)


def test_equal_shares_take_the_lower_key_block_and_nearer_diagonal():
    # One row, at position 143, attends to all keys equally.
    result = decide(torch.zeros(1, 144), gamma=0.2)
    assert result.vertical[0, 0].tolist() == pytest.approx([1 / 9] * 9, abs=1e-12)
    # Offsets 0 to 15 give diagonal 0 only a share 1 - x/16 each: 8.5 of 144.
    assert result.slash[0, 0].tolist() == pytest.approx([8.5 / 144] + [1 / 9] * 8, abs=1e-12)
    # Two of each: key blocks 0 and 1, diagonals 1 and 2, which are blocks 7 and 6 here.
    assert blocks(result) == {(0, j) for j in (0, 1, 6, 7, 8)}
    assert result.vertical_margin.item() < 1e-9
    assert result.slash_margin.item() < 1e-9


def test_equal_shares_take_the_nearer_diagonal():
    # Offset 1.5 blocks: half on diagonal 1, half on 2; keys likewise.
    result = decide(planted_slash(64, 24), gamma=0.5)
    assert result.slash[0, 0].tolist() == [0.0, 0.5, 0.5, 0.0]
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (1, 1)
    assert blocks(result) == lines(4, {1}, {1})
    assert result.slash_margin.item() == 0.0
    assert result.margin.item() == 0.0


def test_budgets_bound_both_counts():
    scores = torch.zeros(128, 128)
    few = planted_slash(128, 0)
    result = decide(few, gamma=0.5, min_budget=2 * BLOCK + 1)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (3, 3)
    # Key block 7 and diagonal 0 hold all; ties at 0 go to the lowest index.
    assert blocks(result) == lines(8, {7, 0, 1}, {0, 1, 2})
    assert result.vertical_margin.item() == 1.0
    result = decide(scores, gamma=1.0, max_budget=2 * BLOCK + 1)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (3, 3)
    result = decide(few, gamma=0.5, min_budget=10_000)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (8, 8)
    result = decide(scores, max_budget=0)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (0, 0)
    assert blocks(result) == lines(8, set(), set())


def test_only_visible_lines_are_candidates():
    # The row at position 47 sees keys 40 to 47: block 2 on diagonal 0.
    result = decide(torch.zeros(1, 48), window=8, min_budget=10 * BLOCK)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (1, 1)
    # Offset x of 0 to 7 leaves x/16 on diagonal 1, which holds no visible block.
    assert result.slash[0, 0].tolist() == pytest.approx([1 - 3.5 / 16, 0.0, 0.0], abs=1e-12)
    assert blocks(result) == {(0, 2)}
    assert result.density.item() == 1.0
