"""The fast path against the reference, and the guarantees of the selection in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, cases, sparse_cases, structured_inputs
from tests.comparisons import Drawn, Tally, assert_as_the_oracle
from tests.expected import by_block, visible_pairs

# float64 sums of the reference's shares against float32 decisions
ROUNDING = 1e-5


def compare(case, tally):
    expected = case.reference()
    assert_as_the_oracle(case.search(), expected, tally)
    return expected


def test_equals_the_reference():
    tally = Tally()

    @settings(max_examples=120)
    @given(cases())
    def run(case):
        compare(case, tally)

    run()
    tally.check()


def test_equals_the_reference_where_blocks_are_dropped():
    tally, drawn = Tally(), Drawn()

    @settings(max_examples=50)
    @given(sparse_cases())
    def run(case):
        drawn.add(compare(case, tally))

    run()
    tally.check()
    drawn.check()


def test_left_padding_by_whole_blocks_shifts_the_mask():
    tally = Tally()

    @settings(max_examples=30)
    @given(sparse_cases(padded=False, chunked=False), st.integers(1, 3), st.integers(0, 2**31))
    def run(case, blocks, seed):
        expected = case.reference()
        tally.add_decisions(expected)
        more = blocks * case.config.block_size
        batch, num_heads, length, head_dim = case.query.shape
        generator = torch.Generator().manual_seed(seed)
        junk = structured_inputs(generator, batch, num_heads, case.key.shape[1], more, more, head_dim)
        query, key = (torch.cat(pair, 2) for pair in zip(junk, (case.query, case.key), strict=True))
        attention_mask = torch.arange(more + length)[None] >= more
        padded = Case(query, key, case.config, case.scores, attention_mask).search()
        assert not padded.keep[:, :, :blocks].any()
        assert not padded.keep[..., :blocks].any()
        clear = expected.margin > ROUNDING
        assert torch.equal(padded.keep[..., blocks:, blocks:][clear], expected.keep[clear])
        torch.testing.assert_close(padded.stats.js_distance.double() ** 2, expected.js_distance**2, atol=2e-6, rtol=1e-4)

    run()
    tally.check()


def test_last_chunk_on_a_boundary_equals_the_whole():
    tally, dropped = Tally(), []

    @settings(max_examples=40)
    @given(
        sparse_cases(
            chunked=False,
            windowed=False,
            query_aware="per_query",
            pattern_queries="last",
            index_queries="last",
        ),
        st.data(),
    )
    def run(case, data):
        size, length = case.config.block_size, case.query.shape[2]
        first = data.draw(st.integers(1, length // size - 1), label="first block of the chunk")
        expected = case.reference()
        tally.add_decisions(expected)
        chunk = Case(case.query[:, :, first * size :], case.key, case.config, case.scores, case.attention_mask).search()
        clear = expected.margin > ROUNDING
        assert torch.equal(chunk.keep[clear], expected.keep[:, :, first:][clear])
        assert torch.equal(chunk.stats.is_query_aware[clear], expected.is_query_aware[clear])
        dropped.append(bool((chunk.stats.density < 1).any()))

    run()
    tally.check()
    assert any(dropped)


# What gamma promises


def fully_kept_lines(case, keep):
    """Key blocks and diagonals with all visible blocks kept, (num_heads, num_kv_blocks) each."""
    size = case.config.block_size
    q_len, kv_len = case.query.shape[2], case.key.shape[2]
    missing = by_block(visible_pairs(case), size) & ~keep[0]
    block_of_row = (kv_len - q_len + torch.arange(q_len)) // size
    columns = ~missing.any(-2)
    diagonals = torch.ones_like(columns)
    for h, r, j in missing.nonzero().tolist():
        for block in block_of_row[r * size : (r + 1) * size].unique().tolist():
            if block >= j:
                diagonals[h, block - j] = False
    return columns, diagonals


def test_vertical_slash_head_holds_gamma_of_its_lines():
    checked = []

    @settings(max_examples=40)
    @given(sparse_cases(tau=0.0))
    def run(case):
        keep, expected = case.search().keep, case.reference()
        columns, diagonals = fully_kept_lines(case, keep)
        for held, values in ((columns, expected.vertical[0]), (diagonals, expected.slash[0])):
            share = (values * held).sum(-1) / values.sum(-1)
            assert (share >= case.gammas - ROUNDING).all()
            checked.extend((~held).any(-1).tolist())

    run()
    assert sum(checked) > 0.4 * len(checked)


def test_vertical_slash_head_holds_gamma_of_its_rows_attention():
    least = []

    @settings(max_examples=40)
    @given(sparse_cases(tau=0.0))
    def run(case):
        coverage = case.search().stats.coverage
        assert (coverage >= case.gammas - ROUNDING).all()
        least.append(coverage.min().item())

    run()
    assert min(least) < 0.95


def test_line_counts_are_minimal():
    counted = []

    @settings(max_examples=40)
    @given(sparse_cases(tau=0.0, min_budget=0))
    def run(case):
        stats, expected = case.search().stats, case.reference()
        for counts, values in ((stats.num_vertical_blocks, expected.vertical), (stats.num_slash_blocks, expected.slash)):
            for count, shares, gamma in zip(counts[0].tolist(), values[0], case.gammas, strict=True):
                heaviest = shares.sort(descending=True).values
                threshold = gamma * shares.sum()
                assert heaviest[:count].sum() >= threshold * (1 - ROUNDING)
                assert heaviest[: count - 1].sum() < threshold * (1 + ROUNDING)
                counted.append((count, len(shares)))

    run()
    # some heads need several lines, and not all of them
    assert sum(1 < count < lines for count, lines in counted) > 0.1 * len(counted)


@pytest.mark.parametrize("query_aware", ["flatten", "per_query"])
def test_query_aware_head_holds_gamma_of_its_map_and_no_more(query_aware):
    spare = []

    @settings(max_examples=30)
    @given(sparse_cases(tau=1.0, min_budget=0, query_aware=query_aware))
    def run(case):
        keep, expected = case.search().keep[0], case.reference()
        size = case.config.block_size
        visible = by_block(visible_pairs(case), size)[0]
        for h in expected.is_query_aware[0].nonzero().flatten().tolist():
            pooled, gamma = expected.pooled[0, h], case.gammas[h]
            position = (case.key.shape[2] - case.query.shape[2] + torch.arange(case.query.shape[2])) // size
            free = keep[h].clone()  # kept because of its weight
            for r, blocks in enumerate(position.split(size)):
                free[r, blocks] = False
                free[r, visible[r].nonzero()[:1].flatten()] = False
            groups = range(len(pooled)) if query_aware == "per_query" else [slice(None)]
            for group in groups:
                shares, kept, chosen = pooled[group], keep[h][group], pooled[group][free[group]]
                assert shares[kept].sum() >= gamma * shares.sum() * (1 - ROUNDING)
                if len(chosen):
                    heavier = shares[shares > chosen.min() * (1 + ROUNDING)]
                    assert heavier.sum() < gamma * shares.sum() * (1 + ROUNDING)
                    spare.append(int((visible & ~keep[h]).sum()))

    run()
    assert len(spare) > 10
    assert sum(map(bool, spare)) > 0.25 * len(spare)


@settings(max_examples=40)
@given(sparse_cases(windowed=False), st.integers(1, 4))
def test_floor_keeps_the_heaviest_lines_of_both_kinds_of_head(case, floor):
    case = case.with_config(gamma=0.01, min_budget=floor * case.config.block_size)
    result, expected = case.search(), case.reference()
    lines = fully_kept_lines(case, result.keep)
    counts = result.stats.num_vertical_blocks, result.stats.num_slash_blocks
    for held, count, values in zip(lines, counts, (expected.vertical, expected.slash), strict=True):
        assert (count >= floor).all()
        for h, shares in enumerate(values[0]):
            heaviest = shares.sort(descending=True)
            if shares[heaviest.indices[floor - 1]] > shares[heaviest.indices[floor]] * (1 + ROUNDING):
                assert held[h, heaviest.indices[:floor]].all()
