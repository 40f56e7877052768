"""method="hybrid": plain code and kernels against the oracle; its thresholds."""

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flexmask import flexprefill_mask, hybrid_mask, plain
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks.hybrid.plain import row_blocks, row_evidence
from tests.attention_calls import call, padding
from tests.cases import Case, Config, by_kernels, cases, hybrid_length, hybrid_rule, sparse_cases
from tests.comparisons import assert_as_the_oracle, compare_drawn
from tests.compile_support import cut, traced
from tests.compile_support import fresh_compiler as fresh_compiler
from tests.oracle.hybrid import Rule


def test_equals_the_oracle():
    drawn = []
    by_stride = st.sampled_from([1, 4, 8, 16]).flatmap(lambda n: cases(method="hybrid", row_stride=n, block_sizes=[16]))
    for length in (16384, 64, 160, 512):
        with hybrid_length(length):
            compare_drawn(by_stride, 15)
            drawn.append(compare_drawn(sparse_cases(method="hybrid", row_stride=4), 8))
    assert sum(each.sparse for each in drawn) > 0.15 * sum(each.heads for each in drawn)


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
        "q_len": 170, "kv_len": 280, "heads": (4, 1), "batch": 2, "attention_mask": padding(280, ("holes", 7), ("left", 60)),
        "q_offset": torch.tensor([100, 20]), "scores": {"window": 190, "softcap": 20.0}, "gamma": (0.6, 0.9, 0.8, 0.95),
        "min_budget": 16,
    },
}  # fmt: skip


def hybrid_call(**given: Any) -> Case:
    defaults = {"method": "hybrid", "heads": (2, 1), "row_stride": 4, "sharpness": 5.0, "seed": 3}
    return call(**{**defaults, **given})


@pytest.mark.parametrize("by", ["plain, short", "plain, long", "kernels, long"])
@pytest.mark.parametrize("name", CALLS)
def test_plain_code_and_kernels_equal_the_oracle(name, by):
    case = hybrid_call(**CALLS[name])
    where: Any = contextlib.nullcontext()
    if "kernels" in by:
        pytest.importorskip("triton", minversion="3.2", reason="older interpreters do not run with today's NumPy")
        if torch.cuda.is_available():
            pytest.skip("where there is a GPU, kernels run there")
        where = by_kernels()
    kv_len = case.key.shape[2]
    seen = min(kv_len, case.scores.get("window", kv_len))
    with hybrid_length(3 * seen // 4 + 1 if "long" in by else 16384):
        expected = case.reference()
        if case.attention_mask is not None:  # what padding holds has no say
            absent = (case.attention_mask == 0)[:, None, :, None]
            case.key = torch.where(absent, NAN, case.key)
            if case.query.shape[2] == kv_len:
                case.query = torch.where(absent, NAN, case.query)
        with where:
            result = case.search()
    # every decision has a margin here
    assert not assert_as_the_oracle(result, expected).any()
    assert (expected.density < 1).any() or kv_len == 1


def test_the_constants_are_those_of_the_text():
    """docs/algorithm.md has them as numbers; the oracle reads the product's."""
    by_length = {"length": 16384, "gamma": 0.9, "longer": 1 / 2, "most_longer": 1, "earlier_rows": 3 / 5, "first_rows": 1 / 2}
    shares = {"key_block": 1 / 2, "diagonal": 1 / 5, "rows": 1 / 5, "lines": 1 / 16, "nearest": 8, "halvings": 6, "slack": 1 / 64}
    assert hybrid_rule() == Rule(**by_length, **shares)


def test_one_compilation_serves_both_sides_of_the_length():
    run, counter = traced(lambda q, k: hybrid_mask(q, k, 0.9, block_size=32, min_budget=32).kv_indices)
    with hybrid_length(256):
        for length in (600, 130, 257, 200):
            query, key, _ = cut(length, 1)
            expected = hybrid_mask(query, key, 0.9, block_size=32, min_budget=32)
            assert torch.equal(run(query, key), expected.kv_indices)
            # the second length makes the size symbolic
            assert counter.frame_count <= 2


def test_what_only_early_rows_attend_to_is_kept():
    # the last rows look at block 1, rows 64 to 79 at block 2
    query, key = torch.zeros(1, 1, 160, 16), torch.zeros(1, 1, 160, 16)
    key[:, :, 16:32, 0] = key[:, :, 32:48, 1] = 1
    query[:, :, :, 0], query[:, :, 64:80, 0], query[:, :, 64:80, 1] = 40, 0, 40
    options = {"block_size": 16, "min_budget": 0, "tau": 0.0, "row_stride": 8}
    configs = (Config(0.9, method=method, **options) for method in ("flexprefill", "hybrid"))
    by_flexprefill, by_hybrid = (Case(query, key, config).search().keep[0, 0] for config in configs)
    assert not by_flexprefill[4, 2] and by_hybrid[4, 2]
    assert by_hybrid[4:, 1].sum() == 5 and not by_hybrid[5:9, 2].any()


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
    assert keep[19, 2] and not keep[5:19, 2].any() and keep[1:, 1].all() and not keep[6:, 3:5].any()


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


@pytest.mark.parametrize("tokens", [16384, 32768])
def test_by_default_even_heads_hold_half_and_have_no_cliff(tokens):
    gammas = (0.8, 0.9, 0.93, 0.95, 0.98)
    query, key = torch.zeros(1, len(gammas), tokens, 16), torch.zeros(1, 1, tokens, 16)
    _, stats = hybrid_mask(query, key, gammas, return_stats=True)
    kept = dict(zip(gammas, stats.row_coverage[0].tolist(), strict=True))
    assert min(kept.values()) > 0.5 and kept[0.93] - kept[0.9] < 0.3


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_of_equal_blocks_the_nearest_hold_the_floor(share):
    """64 blocks in a query block whose threshold is 25 times their share."""
    query, key = torch.zeros(1, 1, 1024, 16), torch.zeros(1, 1, 1024, 16)
    mask = hybrid_mask(query, key, 0.2, block_size=16, min_budget=0, min_coverage=share)
    keep = mask.to_dense()[0, 0].bool()
    for row in range(8, 63):
        number = math.ceil(share * (row + 1) - 1 / 64)
        assert keep[row].nonzero().flatten().tolist() == sorted({0, *range(row + 1 - number, row + 1)})


def test_the_floor_of_evidence_is_the_same_as_a_number_and_as_a_tensor():
    problem = cut_into_blocks(attention_inputs(torch.zeros(1, 1, 256, 16), torch.zeros(1, 1, 256, 16)).with_offset(), 16, plain)
    evidence, above_all = row_evidence(problem, 4), torch.ones(1, 1, 16)
    none, half, by_tensor = (row_blocks(problem, evidence, above_all, 1 / 16, floor) for floor in (0, 0.5, torch.tensor(0.5)))
    assert torch.equal(half.chosen, by_tensor.chosen) and half.chosen.sum() > none.chosen.sum()


def test_the_nearest_blocks_of_the_last_rows_reach_eight_times_as_far():
    """Of even attention, in which no block passes a threshold; also where a floor exceeds every prompt."""
    query, key = torch.zeros(1, 1, 256, 16), torch.zeros(1, 1, 256, 16)
    options = {"block_size": 16, "min_coverage": 0.0}
    keep = hybrid_mask(query, key, 0.01, min_budget=16, **options).to_dense()[0, 0]
    assert [keep[row].nonzero().flatten().tolist() for row in (12, 15)] == [[0, 12], [0, *range(8, 16)]]
    everything = hybrid_mask(query, key, 0.01, min_budget=2**62, **options).to_dense()[0, 0]
    assert torch.equal(everything.bool(), torch.ones(16, 16, dtype=torch.bool).tril())
