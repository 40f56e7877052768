"""method="hybrid" on heads whose attention has a closed form: what it keeps of even, two-level and spiky ones.

Without a floor, in an even head a threshold selects nothing at one gamma, and everything at one a little higher.
"""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flexmask import METHODS, hybrid_mask
from tests.test_hybrid_thresholds import expected as thresholds

BLOCK, HEAD_DIM = 128, 16
GAMMAS = (0.8, 0.9, 0.93, 0.95, 0.98)
DEFAULT = METHODS["hybrid"].defaults["min_coverage"]


def weights(kind: str, number: int) -> Tensor:
    """What every row gives to each key block that it sees, up to a factor."""
    block = torch.arange(number)
    if kind == "even":
        return torch.ones(number, dtype=torch.float64)
    if kind == "two-level":
        return torch.where(block % 2 == 0, 4.0, 1.0).double()
    return torch.where(block == 3, float(number), 1.0).double()  # spiky: the last rows give half to one block


class Kept(NamedTuple):
    density: float
    share: float  # of the rows' attention, mean over query blocks
    last: float  # of the last query block's


def lines_of(own: Tensor, gamma: float, tolerance: float) -> tuple[Tensor, Tensor]:
    """Key blocks and block diagonals that the last block of rows selects, (number,) bool each."""
    number = len(own)
    key_block, diagonal, _ = (x * (1 - tolerance) for x in thresholds(gamma, number, number, 16384 / BLOCK))
    row, key = torch.arange(BLOCK)[:, None], torch.arange(number * BLOCK)
    offset = (number - 1) * BLOCK + row - key
    attention = torch.where(offset >= 0, own.repeat_interleave(BLOCK), 0.0)
    attention /= attention.sum(1, keepdim=True)
    key_blocks = attention.unflatten(1, (number, BLOCK)).sum(2).amax(0) >= key_block
    # without those key blocks beyond the nearest 16; a key lies between two block diagonals
    is_far = key // BLOCK <= number - 1 - 16
    left = torch.where(key_blocks.repeat_interleave(BLOCK) & is_far, 0.0, attention)
    nearer, fraction = offset.clamp(min=0) // BLOCK, offset.clamp(min=0) % BLOCK / BLOCK
    slash = torch.zeros(number + 1, dtype=torch.float64)
    slash.index_add_(0, nearer.flatten(), (left * (1 - fraction)).flatten())
    slash.index_add_(0, nearer.flatten() + 1, (left * fraction).flatten())
    return key_blocks, slash[:number] / BLOCK >= diagonal


def by_the_rule(kind: str, tokens: int, gamma: float, tolerance: float) -> Kept:
    """From the text; `tolerance`, relative, lowers the thresholds."""
    number, own = tokens // BLOCK, weights(kind, tokens // BLOCK)
    shares = [own[:n] / own[:n].sum() for n in range(1, number + 1)]
    key_blocks, diagonals = lines_of(own, gamma, tolerance)
    kept = []
    for n, share in enumerate(shares, 1):
        least, is_last = thresholds(gamma, n, number, 16384 / BLOCK)[2] * (1 - tolerance), n == number
        block = torch.arange(n)
        on_lines = (key_blocks[:n] | diagonals[:n].flip(0)) & ((share >= least / 16) | is_last)
        # the nearest 256 tokens, eight times as many in the last query block, whose rows are the representative ones
        kept.append((share >= least) | on_lines | (block >= n - (16 if is_last else 2)) | (block == 0))
    held = [float(share[keep].sum()) for share, keep in zip(shares, kept, strict=True)]
    return Kept(sum(int(keep.sum()) for keep in kept) / (number * (number + 1) / 2), sum(held) / number, held[-1])


def by_the_code(kind: str, tokens: int, min_coverage: float) -> list[Kept]:
    """By gamma, one per head."""
    own = weights(kind, tokens // BLOCK)
    query = torch.zeros(1, len(GAMMAS), tokens, HEAD_DIM)
    query[..., 0] = math.sqrt(HEAD_DIM)
    key = torch.zeros(1, 1, tokens, HEAD_DIM)
    key[..., 0] = own.log().float().repeat_interleave(BLOCK)
    mask, stats = hybrid_mask(query, key, gamma=GAMMAS, min_coverage=min_coverage, return_stats=True)
    keep = mask.to_dense()[0, :, -1].double()
    last = keep @ (own / own.sum())
    return [
        Kept(*each) for each in zip(*(x[0].tolist() for x in (stats.density, stats.row_coverage)), last.tolist(), strict=True)
    ]


@pytest.mark.parametrize("kind", ["even", "two-level", "spiky"])
@pytest.mark.parametrize(
    "tokens", [4096, 8192, 16384, *(pytest.param(tokens, marks=pytest.mark.slow) for tokens in (32768, 65536))]
)
def test_keeps_what_the_text_says(kind, tokens):
    for gamma, found in zip(GAMMAS, by_the_code(kind, tokens, 0.0), strict=True):
        # a share that equals its threshold may fall either way
        fewest, most = (by_the_rule(kind, tokens, gamma, tolerance) for tolerance in (-1e-5, 1e-5))
        for name in Kept._fields:
            least, largest = getattr(fewest, name), getattr(most, name)
            assert least - 1e-4 <= getattr(found, name) <= largest + 1e-4, (gamma, name)


def test_an_even_head_loses_nearly_everything_at_one_gamma_and_nothing_at_the_next():
    """The cliff without a floor, at 32k tokens: it ends between gamma 0.93 and 0.95."""
    kept = dict(zip(GAMMAS, by_the_code("even", 32768, 0.0), strict=True))
    assert kept[0.9] == pytest.approx((0.0447, 0.1068, 0.0664), abs=5e-4)
    assert kept[0.95] == pytest.approx((1, 1, 1), abs=1e-6)


@pytest.mark.parametrize("kind", ["even", "two-level"])
@pytest.mark.parametrize("tokens", [16384, 32768, pytest.param(65536, marks=pytest.mark.slow)])
def test_by_default_every_head_holds_half_and_has_no_cliff(kind, tokens):
    found = dict(zip(GAMMAS, by_the_code(kind, tokens, DEFAULT), strict=True))
    for kept in found.values():
        assert kept.share > 0.5 and kept.last > 0.5 - 1e-3
    assert found[0.93].share - found[0.9].share < 0.3


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_of_equal_blocks_the_nearest_hold_the_floor(share):
    """64 blocks in a query block whose threshold is 25 times their share."""
    query, key = torch.zeros(1, 1, 1024, HEAD_DIM), torch.zeros(1, 1, 1024, HEAD_DIM)
    mask = hybrid_mask(query, key, 0.2, block_size=16, min_budget=0, min_coverage=share)
    keep = mask.to_dense()[0, 0].bool()
    for row in range(8, 63):
        number = math.ceil(share * (row + 1) - 1 / 64)
        assert keep[row].nonzero().flatten().tolist() == sorted({0, *range(row + 1 - number, row + 1)})


def test_a_floor_of_all_keeps_all():
    query, key = (torch.randn(1, 2, 1000, 32, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    _, stats = hybrid_mask(3 * query, key, 0.3, block_size=16, min_budget=0, min_coverage=1.0, return_stats=True)
    assert stats.density.tolist() == [[1.0, 1.0]]


def test_a_spike_is_never_lost():
    for tokens in (4096, 16384):
        for kept in by_the_code("spiky", tokens, 0.0):
            assert kept.share > 0.5 and kept.last > 0.5
