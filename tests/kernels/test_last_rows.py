"""The lines of the last rows by the kernel, against the plain ranks and thresholds."""

from __future__ import annotations

import pytest
import torch

from flexmask.base.hybrid_rule import DIAGONAL, KEY_BLOCK
from flexmask.config import FlexPrefillConfig
from flexmask.plain.hybrid import reaches
from flexmask.plain.top_p import ranks
from tests.kernels.support import by_head, normal

pytest.importorskip("triton")

from flexmask.kernels.last_rows import last_rows_lines


@pytest.mark.parametrize("floor", [0, 1, 3, 32])
@pytest.mark.parametrize("blocks", [1, 33, 70, 128])
def test_equals_the_plain_steps(blocks, floor):
    # a program ranks its lines among all lines, tile by tile; in eighths there are many equal shares
    lines = (normal(2, 2, 3, blocks).abs() * 2).round() / 8
    lines[:, 0, 1] = -1.0  # no row sees anything
    lines[:, 1, :, blocks // 2 :: 3] = -1.0
    lines[:, 1, 2, ::5] = torch.nan
    gamma = by_head([0.5, 0.9, 0.99], 3)
    config = FlexPrefillConfig(block_size=16, min_budget=2 * 16 * floor, selection="hybrid")
    assert config.half_of_min_blocks == floor

    candidates = lines != -1.0
    most, mean = torch.where(candidates, lines, 0.0)
    heaviest = ranks(most.nan_to_num(nan=0.0), candidates[0]) < floor
    near = torch.arange(blocks) < floor
    expected = torch.stack(
        [
            (heaviest | reaches(most, KEY_BLOCK, gamma)) & candidates[0],
            (near | reaches(mean, DIAGONAL, gamma)) & candidates[1],
        ]
    )
    rows = torch.zeros(1, 17, dtype=torch.int32)
    found = last_rows_lines(lines, rows, gamma, config)
    assert torch.equal(found.kept != 0, expected)
    assert found.rows is rows and found.nearest == 4 * floor
    # kernels count blocks in int32
    assert last_rows_lines(lines, rows, gamma, FlexPrefillConfig(block_size=16, min_budget=2**62)).nearest == 2**30
