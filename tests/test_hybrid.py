"""method="hybrid": plain code and kernels against the oracle; its thresholds."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmask import flexprefill_mask, hybrid_mask, plain, sparse_attention_varlen
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks import hybrid
from tests.attention_calls import padding
from tests.cases import Case, Config, by_kernels, cases, hybrid_length, sparse_cases, structured_inputs
from tests.comparisons import Tally, assert_same_blocks, assert_same_statistics, assert_well_formed, same_values
from tests.compile_support import cut, traced
from tests.compile_support import fresh_compiler as fresh_compiler
from tests.expected import by_block, visible_pairs

LENGTHS = st.sampled_from([16384, 64, 160, 512])


def compare(case: Case) -> Any:
    result, expected = case.search(), case.reference()
    assert_well_formed(result)
    assert_same_blocks(result, expected)
    assert_same_statistics(result, expected)
    return expected


def test_equals_the_oracle():
    tally, densities = Tally(), []

    @settings(max_examples=60)
    @given(
        st.sampled_from([1, 4, 8, 16]).flatmap(lambda stride: cases(method="hybrid", row_stride=stride, block_size=16)), LENGTHS
    )
    def run(case, length):
        with hybrid_length(length):
            tally.add_decisions(compare(case))

    @settings(max_examples=30)
    @given(sparse_cases(method="hybrid", row_stride=4), LENGTHS)
    def run_sparse(case, length):
        with hybrid_length(length):
            expected = compare(case)
        tally.add_decisions(expected)
        densities.extend(expected.density.flatten().tolist())

    run()
    run_sparse()
    tally.check()
    assert sum(0 < density < 0.9 for density in densities) > 0.15 * len(densities)


NAN = float("nan")
CALLS: dict[str, dict[str, Any]] = {
    "1": {"q_len": 1},
    "63": {"q_len": 63},
    "129": {"q_len": 129, "heads": (4, 2)},
    "1000": {"q_len": 1000, "block_size": 64, "row_stride": 16, "min_budget": 64},
    "chunk": {"q_len": 150, "kv_len": 261, "min_budget": 30},
    "chunk, earlier": {"q_len": 90, "kv_len": 261, "q_offset": 100},
    "left padding": {"q_len": 250, "batch": 2, "attention_mask": padding(250, ("left", 70), ("left", 5))},
    "right padding": {"q_len": 250, "batch": 2, "attention_mask": padding(250, ("right", 100), ("all", 0))},
    "holes": {"q_len": 250, "attention_mask": padding(250, ("holes", 7)), "min_budget": 16},
    "window": {"q_len": 300, "scores": {"window": 150}, "min_budget": 16},
    "soft cap": {"q_len": 200, "scores": {"softcap": 5.0, "scale": 0.3}},
    "gamma by head": {"q_len": 200, "heads": (6, 2), "gamma": (0.5, 0.9, 0.2, 1.0, 0.3, 0.7)},
    "everything": {
        "q_len": 170,
        "kv_len": 280,
        "heads": (4, 1),
        "batch": 2,
        "attention_mask": padding(280, ("holes", 7), ("left", 60)),
        "q_offset": torch.tensor([100, 20]),
        "scores": {"window": 190, "softcap": 20.0},
        "gamma": (0.6, 0.9, 0.8, 0.95),
        "min_budget": 16,
    },
}


def call(
    q_len: int,
    kv_len: int = 0,
    heads: tuple[int, int] = (2, 1),
    batch: int = 1,
    scores: Any = None,
    seed: int = 3,
    **options: Any,
) -> Case:
    rest = {name: options.pop(name, None) for name in ("attention_mask", "q_offset")}
    generator = torch.Generator().manual_seed(seed)
    query, key = structured_inputs(generator, batch, *heads, q_len, kv_len or q_len, 32, sharpness=5.0)
    config = Config(**{"gamma": 0.5, "block_size": 16, "row_stride": 4, "min_budget": 0, "method": "hybrid", **options})
    return Case(query, key, config, scores or {}, **rest)


@pytest.mark.parametrize(
    ("by", "is_long"),
    [("plain", False), ("plain", True), ("kernels", True)],
    ids=["plain, short", "plain, long", "kernels, long"],
)
@pytest.mark.parametrize("name", CALLS)
def test_plain_code_and_kernels_equal_the_oracle(name, by, is_long):
    case = call(**CALLS[name])
    where: Any = contextlib.nullcontext()
    if by == "kernels":
        pytest.importorskip("triton", minversion="3.2", reason="older interpreters do not run with today's NumPy")
        if torch.cuda.is_available():
            pytest.skip("where there is a GPU, kernels run there")
        where = by_kernels()
    kv_len = case.key.shape[2]
    seen = min(kv_len, case.scores.get("window", kv_len))
    with hybrid_length(3 * seen // 4 + 1 if is_long else 16384):
        expected = case.reference()
        if case.attention_mask is not None:  # what padding holds has no say
            absent = (case.attention_mask == 0)[:, None, :, None]
            case.key = torch.where(absent, NAN, case.key)
            if case.query.shape[2] == kv_len:
                case.query = torch.where(absent, NAN, case.query)
        with where:
            result = case.search()
    assert_well_formed(result)
    # every decision has a margin here
    assert not assert_same_blocks(result, expected).any()
    assert_same_statistics(result, expected)
    assert (expected.density < 1).any() or kv_len == 1


def test_packed_sequences_keep_what_they_keep_alone(without_kernel):
    lengths = (300, 40, 150)
    case = call(sum(lengths), min_budget=16)
    query, key = (x[0].transpose(0, 1) for x in (case.query, case.key))
    bounds = [0, *itertools.accumulate(lengths)]
    with hybrid_length(160):
        _, stats = sparse_attention_varlen(query, key, key, bounds, return_stats=True, dense_below=0, **case.config.call)
        for each, (first, last) in zip(stats, itertools.pairwise(bounds), strict=True):
            alone = Case(case.query[:, :, first:last], case.key[:, :, first:last], case.config)
            assert_same_statistics(alone.search()._replace(stats=each), alone.reference())
    assert len({float(each.density[0, 0]) for each in stats}) == 3


# The thresholds by length


def thresholds(length, kv_len=0, window=None, attention_mask=None, gamma=0.9, block_size=16):
    query, key = torch.zeros(1, 2, length, 16), torch.zeros(1, 1, kv_len or length, 16)
    inputs = attention_inputs(query, key, window=window, attention_mask=attention_mask).with_offset()
    return hybrid.thresholds(cut_into_blocks(inputs, block_size, plain), torch.tensor([gamma, 0.5], dtype=torch.float64))


# of 16 blocks
LONG = 256


def test_more_tokens_never_raise_what_they_are_measured_by():
    with hybrid_length(LONG):
        found = [thresholds(length) for length in (1, 100, 128, 129, 200, 256, 257, 300, 500, 1000)]
    for shorter, longer in itertools.pairwise(found):
        assert (longer.key_block <= shorter.key_block).all() and (longer.diagonal <= shorter.diagonal).all()
        assert (longer.rows[..., -1] <= shorter.rows[..., -1]).all()
    assert found[-1].key_block[0, 0] < found[0].key_block[0, 0] / 4


def test_chunks_have_the_thresholds_of_their_last_rows():
    with hybrid_length(LONG):
        whole, chunk, earlier = thresholds(960), thresholds(160, 960), thresholds(800)
    torch.testing.assert_close(chunk, type(chunk)(whole.key_block, whole.diagonal, whole.rows[..., -10:]))
    assert (earlier.key_block > whole.key_block).all()


def test_padding_does_not_count():
    with hybrid_length(LONG):
        alone = thresholds(640)
        for side in ("left", "right"):
            found = thresholds(960, attention_mask=padding(960, (side, 320)))
            own = slice(20, None) if side == "left" else slice(0, 40)
            torch.testing.assert_close(found, type(found)(alone.key_block, alone.diagonal, found.rows))
            torch.testing.assert_close(found.rows[..., own], alone.rows)


def test_windows_hide_what_they_hide_from_the_thresholds():
    with hybrid_length(LONG):
        # the last row of each block sees 20 whole blocks and its own
        alone, found = thresholds(336), thresholds(960, window=321)
    torch.testing.assert_close(found, type(found)(alone.key_block, alone.diagonal, found.rows))
    torch.testing.assert_close(found.rows[..., 20:], alone.rows[..., -1:].expand(-1, -1, 40))
    torch.testing.assert_close(found.rows[..., :20], alone.rows[..., :20])


def test_the_first_rows_fall_less_with_gamma_than_the_last():
    with hybrid_length(LONG):
        low, high = (thresholds(2048, gamma=gamma).rows[0, 0] for gamma in (0.9, 0.98))
    torch.testing.assert_close(high[-1], low[-1] / 5)
    assert (high[:8] > low[:8] / 4).all() and (high[1:] <= high[:-1]).all()


def test_one_compilation_serves_both_sides_of_the_length():
    run, counter = traced(lambda q, k: hybrid_mask(q, k, 0.9, block_size=32, min_budget=32).kv_indices)
    with hybrid_length(LONG):
        for length in (600, 130, 257, 200):
            query, key, _ = cut(length, 1)
            expected = hybrid_mask(query, key, 0.9, block_size=32, min_budget=32)
            assert torch.equal(run(query, key), expected.kv_indices)
            # the second length makes the size symbolic
            assert counter.frame_count <= 2


# What it keeps


@pytest.fixture(scope="module")
def case():
    return call(400, heads=(6, 2), seed=11)


@pytest.mark.parametrize("length", [16384, 128])
def test_more_gamma_keeps_more(case, length):
    with hybrid_length(length):
        maps = [case.with_config(gamma=gamma).search().keep for gamma in (0.3, 0.6, 0.8, 0.9, 0.97, 1.0)]
    # a kept key block may take the attention away from a diagonal
    assert all((fewer & ~more).sum() < 0.01 * fewer.sum() for fewer, more in itertools.pairwise(maps))
    assert len({int(each.sum()) for each in maps}) > 4
    assert torch.equal(maps[-1][0], by_block(visible_pairs(case), 16)[0].expand_as(maps[-1][0]))


def test_what_only_early_rows_attend_to_is_kept():
    # the last rows look at block 1, rows 64 to 79 at block 2
    query, key = torch.zeros(1, 1, 160, 16), torch.zeros(1, 1, 160, 16)
    key[:, :, 16:32, 0] = key[:, :, 32:48, 1] = 1
    query[:, :, :, 0], query[:, :, 64:80, 0], query[:, :, 64:80, 1] = 40, 0, 40
    options = {"block_size": 16, "min_budget": 0, "tau": 0.0, "row_stride": 8}
    found = {
        method: Case(query, key, Config(0.9, method=method, **options)).search().keep[0, 0]
        for method in ("flexprefill", "hybrid")
    }
    assert not found["flexprefill"][4, 2] and found["hybrid"][4, 2]
    assert found["hybrid"][4:, 1].sum() == 5 and not found["hybrid"][5:9, 2].any()


def needle(rows: dict[int, int], length: int = 320) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that look at block 1, except some."""
    query, key = torch.zeros(1, 1, length, 16), torch.zeros(1, 1, length, 16)
    blocks = [1, *rows.values()]
    for part, block in enumerate(blocks):
        key[:, :, 16 * block : 16 * (block + 1), part] = 1
    looks_at = torch.zeros(length, dtype=torch.int64)
    looks_at[list(rows)] = torch.arange(1, len(blocks))
    query[0, 0, torch.arange(length), looks_at] = 60
    return query, key


def test_what_one_of_the_last_rows_attends_to_is_kept_where_they_stand():
    # one of the last 16 rows looks at block 2; earlier rows give it nothing
    keep = Case(*needle({317: 2}), Config(0.9, method="hybrid", block_size=16, min_budget=0, row_stride=16)).search().keep[0, 0]
    assert keep[19, 2] and not keep[5:19, 2].any()
    assert keep[1:, 1].all() and not keep[6:, 3:5].any()


@pytest.mark.parametrize(
    ("method", "gamma", "diagonals"),
    # 13 of the last 16 rows look at block 1, at two diagonals; the others at three more. Hybrid needs no diagonal for what its
    # four key blocks hold
    [("hybrid", 0.5, 0), ("hybrid", 0.99, 0), ("flexprefill", 0.99, 6)],
)
def test_statistics_tell_key_blocks_from_diagonals(method, gamma, diagonals):
    make = {"hybrid": hybrid_mask, "flexprefill": flexprefill_mask}[method]
    options = {"row_stride": 16} if method == "hybrid" else {"tau": 0.0}
    query, key = needle({317: 2, 313: 3, 309: 4})
    mask, stats = make(query, key, gamma, block_size=16, min_budget=0, return_stats=True, **options)
    assert mask.to_dense()[0, 0, 19, 1:5].all()
    assert (stats.num_vertical_blocks.item(), stats.num_slash_blocks.item()) == (4, diagonals)


def test_last_chunk_on_a_boundary_equals_the_whole(case):
    with hybrid_length(128):
        whole = case.search()
        for first in (1, 7, 24):
            chunk = Case(case.query[:, :, first * 16 :], case.key, case.config).search()
            assert torch.equal(chunk.keep, whole.keep[:, :, first:])


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_spoils_its_own_head_only(case, value):
    query = case.query.clone()
    query[0, 2, 390] = value
    before, after = case.search(), case.search(query)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(before.keep[:, others], after.keep[:, others])
    assert all(same_values(vars(before.stats)[name][:, others], vars(after.stats)[name][:, others]) for name in vars(after.stats))
    assert_well_formed(after)
    # NaN drops nothing
    assert (after.keep[:, 2] >= before.keep[:, 2]).all()
