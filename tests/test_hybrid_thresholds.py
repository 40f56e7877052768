"""method="hybrid": threshold values against the formula of the text, docs/algorithm.md, with its constants as numbers."""

import math
from typing import Any

import pytest
import torch

from flexmask import plain
from flexmask._torch import HAS_TRITON
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import attention_inputs
from flexmask.base.thresholds import Thresholds
from flexmask.block_masks import hybrid
from tests.kernels.support import DEVICE

if HAS_TRITON:
    from flexmask import kernels

TWINS = pytest.mark.parametrize("steps", [plain, kernels] if HAS_TRITON else [plain], ids=lambda steps: steps.__name__[9:])
# 1 - gamma is nowhere below 1e-6 in the power, so 1 - 1e-7 stands behind that
GAMMAS = (0.3, 0.8, 0.9, 0.91, 0.95, 0.98, 0.995, 0.9999, 1 - 1e-6)


def expected(gamma: float, n: int, most: int, n0: float) -> tuple[float, float, float]:
    """Thresholds of key blocks, of diagonals, and of the own rows of a query block that sees n key blocks."""
    g = 1 - gamma
    if gamma > 0.9 and most > n0:
        g = 0.1 * (g / 0.1) ** (1 + min(1, math.log2(most / n0) / 2))
    e = g * min(2, n0 / most)
    p = 3 / 5 * max(0, 1 - n0 / most)
    return e / 2, e / 5, e / 5 * (most / n * max(1, (n0 / (2 * n)) ** 3 * 0.1 / g)) ** p


def found(steps: Any, length: int, block_size: int, gammas: tuple[float, ...], **fields: Any) -> Thresholds:
    batch = fields["attention_mask"].shape[0] if "attention_mask" in fields else 1
    heads = torch.zeros(batch, 1, length, 16, device=DEVICE)
    inputs = attention_inputs(heads.expand(-1, len(gammas), -1, -1), heads, **fields).with_offset()
    problem = cut_into_blocks(inputs, block_size, steps)
    made = hybrid.thresholds(problem, torch.tensor(gammas, dtype=torch.float64, device=DEVICE))
    return Thresholds(*(x.cpu() for x in made))


def compare(thresholds: Thresholds, row: int, seen: list[int], n0: float, gammas: tuple[float, ...] = GAMMAS) -> None:
    """One batch row; `seen` are key blocks by query block."""
    values = torch.tensor([[expected(gamma, n, max(seen), n0) for n in seen] for gamma in gammas], dtype=torch.float64)
    torch.testing.assert_close(thresholds.key_block[row], values[:, 0, 0], atol=0, rtol=1e-9)
    torch.testing.assert_close(thresholds.diagonal[row], values[:, 0, 1], atol=0, rtol=1e-9)
    torch.testing.assert_close(thresholds.rows[row], values[:, :, 2], atol=0, rtol=1e-9)


@TWINS
@pytest.mark.parametrize("block_size", [128, 256])
@pytest.mark.parametrize("length", [100, 4096, 8192, 16384, 16385, 20000, 32768, 65536, 131072])
def test_of_whole_prompts_at_every_position(steps, length, block_size):
    compare(found(steps, length, block_size, GAMMAS), 0, list(range(1, -(-length // block_size) + 1)), 16384 / block_size)


@TWINS
def test_by_hand(steps):
    """32k tokens in blocks of 128: n0/N is 1/2, p is 0.3, and at gamma 0.975 g is 0.1 (1/4)^1.5 = 1/80."""
    made = found(steps, 32768, 128, (0.9, 0.975))
    assert made.key_block[0].tolist() == pytest.approx([0.1 / 4, 1 / 320])
    assert made.diagonal[0].tolist() == pytest.approx([0.1 / 10, 1 / 800])
    last, first = made.rows[0, :, -1], made.rows[0, :, 7]  # which sees 8
    assert last.tolist() == pytest.approx([0.1 / 10, 1 / 800])
    # N/n = 32; (n0/2n)^3 = 512, times 8 at the higher gamma
    assert first.tolist() == pytest.approx([0.1 / 10 * (32 * 512) ** 0.3, 1 / 800 * (32 * 512 * 8) ** 0.3])


def test_each_batch_row_has_the_largest_number_of_its_own():
    """Padding does not count, and the longer prompt of a batch does not lower the thresholds of the shorter."""
    tokens = torch.ones(2, 40960, dtype=torch.bool, device=DEVICE)
    tokens[0, :20480] = False
    made = found(plain, 40960, 128, GAMMAS, attention_mask=tokens)
    # a query block without tokens counts as one that sees one
    compare(made, 0, [1] * 160 + list(range(1, 161)), 128)
    compare(made, 1, list(range(1, 321)), 128)


def test_a_window_is_the_largest_number():
    made = found(plain, 32768, 128, GAMMAS, window=20480)
    # a block of rows sees parts of 161 key blocks
    compare(made, 0, [min(r + 1, 161) for r in range(256)], 128)


@TWINS
def test_of_gammas_next_to_1_where_the_power_stops(steps):
    """Beyond 16k tokens, (10 (1 - gamma))^a is taken of at least 1e-6."""
    below, beyond = (found(steps, 65536, 128, (1 - rest,)).key_block.item() for rest in (1e-6, 1e-8))
    assert below == pytest.approx(0.1 * 1e-5**2 / 4 / 2, rel=1e-6)
    assert beyond == pytest.approx(1e-8 * 1e-5 / 4 / 2, rel=1e-6)
    assert found(steps, 65536, 128, (1.0,)).rows.abs().max() == 0
