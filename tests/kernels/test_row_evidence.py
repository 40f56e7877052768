"""The blocks of each query block's own rows by the kernel against the plain steps."""

import pytest
import torch

from flexmask import plain
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import attention_inputs
from tests.kernels.support import DEVICE, HALF, LAYOUTS, by_head, call_of, in_layout, normal

pytest.importorskip("triton")

from flexmask import kernels
from flexmask.kernels.pooling import key_means, split_key_means


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_halves_of_the_means_hold_twice_the_digits(dtype):
    key = normal(2, 3, 500, 64).to(dtype)
    problem = cut_into_blocks(call_of(key, key), 16, kernels)
    means = key_means(problem)
    high, low = split_key_means(problem).unbind(-2)
    assert high.dtype == low.dtype == dtype
    digits = 16 if dtype == torch.bfloat16 else 20
    error = (high.double() + low.double() - means.double()).abs()
    assert (error <= means.abs().double() * 2.0**-digits + 2.0**-24).all()
    assert (error < (high.double() - means.double()).abs())[low != 0].all()


def compare(query, key, row_stride, gammas, padding=None, **scores):
    """Blocks and coverage of both; evidence within rounding of its threshold may fall either way."""
    inputs = attention_inputs(query, key, attention_mask=padding, **scores).with_offset()
    problems = [cut_into_blocks(inputs, 16, steps) for steps in (plain, kernels)]
    plain_evidence, evidence = (problem.steps.row_evidence(problem, row_stride) for problem in problems)
    share, of_lines = plain_evidence.root_mean_square, 0.25
    # later query blocks have lower thresholds
    falling = torch.linspace(1.5, 1.0, share.shape[2], dtype=torch.float64, device=share.device)
    thresholds = (0.2 * (1 - by_head(gammas, query.shape[1])).reshape(1, -1, 1) * falling).contiguous()
    expected = plain.row_blocks(problems[0], plain_evidence, thresholds, of_lines)
    codes = kernels.row_blocks(problems[1], evidence, thresholds, of_lines).codes
    visible = problems[0].visible.expand_as(share)
    for part, found, least in ((expected.chosen, codes & 2, thresholds), (expected.lines, codes & 1, of_lines * thresholds)):
        clear = ((share - least.unsqueeze(-1)).abs() > 1e-4 * least.unsqueeze(-1)) & visible
        assert torch.equal((found != 0)[clear], part[clear])
        assert clear.float().sum() > 0.9 * visible.sum()
    assert (expected.chosen & visible).any() and (~expected.chosen & visible).any()
    assert (expected.lines & ~expected.chosen & visible).any()

    keep = expected.chosen & visible
    held = [
        problem.steps.row_coverage(problem, own, keep) for problem, own in zip(problems, (plain_evidence, evidence), strict=True)
    ]
    for found in zip(*held, strict=True):
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("heads", "stride"), [((2, 2), 4), ((6, 2), 16), ((8, 1), 1)], ids=str)
@pytest.mark.parametrize(
    ("scores", "padded"), [({}, False), ({"window": 60, "softcap": 4.0}, True)], ids=["plain", "window, soft cap, padding"]
)
def test_equals_the_plain_steps(heads, stride, scores, padded):
    query, key = 3 * normal(2, heads[0], 150, 32), normal(2, heads[1], 150, 32, seed=1)
    padding = (torch.rand(2, 150, generator=torch.Generator().manual_seed(2)) < 0.7).to(DEVICE) if padded else None
    compare(query, key, stride, [0.3 + 0.6 * head / heads[0] for head in range(heads[0])], padding, **scores)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    query, key = in_layout(layout, 2, 4, 100, 32), in_layout(layout, 2, 2, 100, 32, seed=1)
    compare(query, key, 8, [0.05, 0.2, 0.4, 0.6], scale=3 * 32**-0.5)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision(dtype):
    query, key = (3 * normal(1, 4, 130, 64)).to(dtype), normal(1, 2, 130, 64, seed=1).to(dtype)
    compare(query, key, 4, [0.5, 0.6, 0.7, 0.8])


def test_heads_of_512():
    query, key = 3 * normal(1, 4, 300, 512), normal(1, 2, 300, 512, seed=1)
    compare(query, key, 4, [0.5, 0.6, 0.7, 0.8])


@pytest.mark.parametrize(
    ("heads", "lengths", "dtype", "scores"),
    [
        pytest.param((2, 2), (700, 700), torch.float32, {}, marks=pytest.mark.slow),  # the next has such tiles too
        ((6, 2), (650, 700), torch.float32, {"window": 640, "softcap": 4.0}),
        ((6, 2), (700, 704), torch.float16, {}),
    ],
    ids=["whole", "window, soft cap, chunk", "half precision"],
)
def test_tiles_that_every_row_sees_whole(heads, lengths, dtype, scores):
    # from 33 key blocks on some tiles touch no edge
    query, key = (3 * normal(1, heads[0], lengths[0], 32)).to(dtype), normal(1, heads[1], lengths[1], 32, seed=1).to(dtype)
    compare(query, key, 4, [0.5 + 0.4 * head / heads[0] for head in range(heads[0])], **scores)


def test_padding_in_tiles_far_from_every_edge():
    """Every row behind the padding sees a tile of key blocks that are not whole."""
    query, key = 3 * normal(1, 2, 640, 32), normal(1, 2, 700, 32, seed=1)
    slot = torch.arange(700, device=key.device)
    padding = ((slot >= 45) & (slot // 4 % 3 != 0)) | (slot >= 60)
    compare(query, key, 4, [0.6, 0.8], padding[None])


def test_coverage_of_a_head_with_nan_is_nan():
    query, key = normal(1, 2, 100, 32), normal(1, 1, 100, 32, seed=1)
    query[0, 1, 64] = torch.nan  # a sampled row
    inputs = attention_inputs(query, key).with_offset()
    for steps in (plain, kernels):
        problem = cut_into_blocks(inputs, 16, steps)
        keep = torch.ones(1, 2, 7, 7, dtype=torch.bool, device=DEVICE)
        covered = steps.row_coverage(problem, steps.row_evidence(problem, 4), keep)
        for found in covered:
            torch.testing.assert_close(found[0, 0].item(), 1.0)
            assert found[0, 1].isnan()


def test_coverage_of_batch_rows_without_sampled_rows():
    """0 if all is padding, NaN if the few tokens are not among the sampled rows."""
    query, key = normal(3, 2, 100, 32), normal(3, 1, 100, 32, seed=1)
    tokens = torch.ones(3, 100, dtype=torch.bool, device=DEVICE)
    tokens[1], tokens[2, 3:] = False, False
    tokens[2, 0] = False
    inputs = attention_inputs(query, key, attention_mask=tokens).with_offset()
    for steps in (plain, kernels):
        problem = cut_into_blocks(inputs, 16, steps)
        keep = torch.ones(3, 2, 7, 7, dtype=torch.bool, device=DEVICE)
        covered = steps.row_coverage(problem, steps.row_evidence(problem, 4), keep)
        expected = torch.tensor([[1.0, 1.0], [0.0, 0.0], [torch.nan, torch.nan]])
        for found in covered:
            torch.testing.assert_close(found.cpu(), expected, equal_nan=True)


@pytest.mark.parametrize("min_coverage", [0.2, 0.7, 1.0])
def test_the_floor_over_more_key_blocks_than_a_program_reads_at_once(min_coverage):
    """Thresholds that keep little: some halvings suffice, none suffices, and the nearest of one are beyond the first tile."""
    query, key = 2 * normal(1, 4, 40, 16), normal(1, 2, 9000, 16, seed=1)
    thresholds = torch.tensor([0.002, 0.02, 0.1, 1.0], dtype=torch.float64, device=DEVICE)[None, :, None].expand(1, 4, 3)
    chosen = []
    for steps in (plain, kernels):
        problem = cut_into_blocks(attention_inputs(query, key).with_offset(), 16, steps)
        evidence = steps.row_evidence(problem, 4)
        floor = torch.tensor(min_coverage, dtype=torch.float64, device=DEVICE)
        blocks = steps.row_blocks(problem, evidence, thresholds.contiguous(), 0.25, floor)
        chosen.append((blocks.chosen if steps is plain else (blocks.codes & 2) != 0) & problem.visible)
    assert torch.equal(*chosen)
    share = chosen[0].float().mean((0, 2, 3))
    assert share.amin() < share.amax() or min_coverage == 1
