"""The fast path against the reference, and the guarantees of the selection, each against its own quantity in float64."""

import gc

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flexmask import FlexPrefillConfig, flexprefill_attention
from flexmask._torch import without_tf32
from tests.helpers import (
    Case,
    Drawn,
    Tally,
    assert_same_blocks,
    assert_same_statistics,
    assert_well_formed,
    by_block,
    cases,
    sparse_cases,
    structured_inputs,
    visible_pairs,
)

# float64 sums of the reference's shares against float32 decisions
ROUNDING = 1e-5


def compare(case, tally):
    """Both sides of one case, compared; they come back for more to be asked of them."""
    result, expected = case.search(), case.reference()
    assert_well_formed(result)
    assert_same_blocks(result, expected)
    tally.add_decisions(expected)
    assert_same_statistics(result, expected)
    return result, expected


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
        drawn.add(compare(case, tally)[1])

    run()
    tally.check()
    drawn.check()


# What is kept at all


@settings(max_examples=60)
@given(cases())
def test_keeps_visible_blocks_only(case):
    visible = by_block(visible_pairs(case), case.config.block_size)[:, None]
    assert not (case.search().keep & ~visible).any()


@settings(max_examples=60)
@given(cases())
def test_full_blocks_are_those_without_a_hidden_pair(case):
    result = case.search()
    full = result.keep & by_block(visible_pairs(case), case.config.block_size, every=True)[:, None]
    assert torch.equal(result.lists.full_kv_num_blocks, full.sum(-1))
    assert torch.equal(result.lists.kv_num_blocks, (result.keep & ~full).sum(-1))


@settings(max_examples=60)
@given(cases())
def test_keeps_first_visible_block_and_diagonal(case):
    size = case.config.block_size
    pairs = visible_pairs(case)
    keep = case.search().keep
    for b, pairs_of_row in enumerate(pairs):
        for r, rows in enumerate(pairs_of_row.split(size)):
            sees = rows.any(0).nonzero().flatten().tolist()
            own = [row.nonzero().max().item() for row in rows if row.any()]  # a valid row's last visible key is its own
            forced = {position // size for position in sees[:1] + own}
            assert keep[b, :, r, list(forced)].all()


@settings(max_examples=50)
@given(cases(gamma=1.0, max_budget=None))
def test_gamma_one_keeps_every_visible_block(case):
    keep = case.search().keep
    assert torch.equal(keep, by_block(visible_pairs(case), case.config.block_size)[:, None].expand_as(keep))


# What gamma promises


def fully_kept_lines(case, keep):
    """Which key blocks and which block diagonals have all their visible blocks kept, (num_heads, num_kv_blocks) each."""
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
            assert (share >= case.config.gamma - ROUNDING).all()
            checked.extend((~held).any(-1).tolist())

    run()
    assert sum(checked) > 0.8 * len(checked)


def test_vertical_slash_head_holds_gamma_of_its_rows_attention():
    least = []

    @settings(max_examples=40)
    @given(sparse_cases(tau=0.0))
    def run(case):
        coverage = case.search().stats.coverage
        assert (coverage >= case.config.gamma - ROUNDING).all()
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
            for count, shares in zip(counts[0].tolist(), values[0], strict=True):
                heaviest = shares.sort(descending=True).values
                threshold = case.config.gamma * shares.sum()
                assert heaviest[:count].sum() >= threshold * (1 - ROUNDING)
                assert heaviest[: count - 1].sum() < threshold * (1 + ROUNDING)
                counted.append((count, len(shares)))

    run()
    assert sum(count > 1 for count, _ in counted) > 0.5 * len(counted)
    assert sum(count < lines for count, lines in counted) > 0.8 * len(counted)


@pytest.mark.parametrize("query_aware", ["flatten", "per_query"])
def test_query_aware_head_holds_gamma_of_its_map_and_no_more(query_aware):
    spare = []

    @settings(max_examples=30)
    @given(sparse_cases(tau=1.0, min_budget=0, query_aware=query_aware))
    def run(case):
        keep, expected = case.search().keep[0], case.reference()
        size, gamma = case.config.block_size, case.config.gamma
        visible = by_block(visible_pairs(case), size)[0]
        for h in expected.is_query_aware[0].nonzero().flatten().tolist():
            pooled = expected.pooled[0, h]
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
    assert len(spare) > 30
    assert sum(map(bool, spare)) > 0.5 * len(spare)


def test_larger_gamma_keeps_more():
    grew = []

    @settings(max_examples=60)
    @given(cases(), st.integers(1, 100), st.integers(1, 100))
    def run(case, percent, other):
        low, high = sorted((percent, other))
        fewer = case.with_config(gamma=low / 100).search().keep
        more = case.with_config(gamma=high / 100).search().keep
        assert not (fewer & ~more).any()
        grew.append(bool((more & ~fewer).any()))

    run()
    assert any(grew)


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


@settings(max_examples=40)
@given(sparse_cases(chunked=False, windowed=False, padded=False, min_budget=0), st.integers(1, 3))
def test_cap_bounds_lines_and_rows(case, cap):
    case = case.with_config(gamma=0.95, max_budget=cap * case.config.block_size)
    result = case.search()
    assert (result.stats.num_vertical_blocks <= cap).all()
    assert (result.stats.num_slash_blocks <= cap).all()
    rows = torch.arange(result.keep.shape[-1])
    # a row keeps its own cap and two blocks more, or two families of lines and the two
    allowed = torch.where(result.stats.is_query_aware, cap, 2 * cap)[..., None] + 2
    assert (result.keep.sum(-1) <= torch.minimum(allowed, rows + 1)).all()


# What must not matter


def spoiled(x, generator):
    return x + torch.randn(x.shape, generator=generator).to(x.dtype)


@settings(max_examples=30)
@given(cases(), st.integers(0, 2**31))
def test_heads_and_batch_rows_do_not_look_at_each_other(case, seed):
    assume(case.query.shape[0] * case.key.shape[1] > 1)
    generator = torch.Generator().manual_seed(seed)
    groups = case.query.shape[1] // case.key.shape[1]
    before = case.search()
    b, h = seed % case.query.shape[0], seed % case.query.shape[1]
    query, key = spoiled(case.query, generator), spoiled(case.key, generator)
    query[b, h], key[b, h // groups] = case.query[b, h], case.key[b, h // groups]
    after = case.search(query, key)
    for name in before.lists._fields:
        assert torch.equal(getattr(before.lists, name)[b, h], getattr(after.lists, name)[b, h]), name
    for name in before.stats._fields:
        assert torch.equal(getattr(before.stats, name)[b, h], getattr(after.stats, name)[b, h]), name


@settings(max_examples=30)
@given(cases(), st.integers(0, 2**31))
def test_tokens_that_do_not_count_have_no_say(case, seed):
    generator = torch.Generator().manual_seed(seed)
    pairs = visible_pairs(case)
    before = case.search()
    row_counts, key_counts = pairs.any(-1)[:, None, :, None], pairs.any(-2)[:, None, :, None]
    query = torch.where(row_counts, case.query, spoiled(case.query, generator))
    if "window" not in case.scores:  # keys out of every row's window still weigh in their block's mean
        case.key = torch.where(key_counts, case.key, float("nan"))
    after = case.search(query)
    for name in before.lists._fields:
        assert torch.equal(getattr(before.lists, name), getattr(after.lists, name)), name


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


@settings(max_examples=20)
@given(cases())
def test_same_inputs_give_the_same_bits(case):
    first, second = case.search(), case.search()
    # (batch, length, heads, head_dim) in memory, as models hand it over
    strided = case.search(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.query, case.key)))
    for other in (second, strided):
        for name in first.lists._fields:
            assert torch.equal(getattr(first.lists, name), getattr(other.lists, name)), name
        for name in first.stats._fields:
            torch.testing.assert_close(getattr(first.stats, name), getattr(other.stats, name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_inputs_give_the_mask_of_their_values_in_float32(dtype):
    @settings(max_examples=25)
    @given(sparse_cases())
    def run(case):
        query, key = case.query.to(dtype), case.key.to(dtype)
        half, whole = case.search(query, key), case.search(query.float(), key.float())
        assert torch.equal(half.keep, whole.keep)
        assert torch.equal(half.stats.js_distance, whole.stats.js_distance)
        assert half.stats.coverage.dtype == torch.float32

    run()


# On a GPU


def gpu_cases(count, **fixed):
    """Fixed cases, so that a GPU's run can be repeated."""
    found = []

    @settings(max_examples=count, derandomize=True, database=None)
    @given(sparse_cases(**fixed) | cases(**fixed))
    def run(case):
        found.append(case)

    run()
    return found


@pytest.mark.gpu
def test_equals_the_reference_on_cuda(cuda):
    tally = Tally()
    # every set of options would be compiled; what the compiler makes of the search is the next test's
    with torch.compiler.set_stance("force_eager"):
        for case in gpu_cases(60):
            expected = case.reference()
            result = case.to(cuda).search()
            assert_well_formed(result)
            assert_same_blocks(result, expected)
            tally.add_decisions(expected)
            assert_same_statistics(result, expected)
    tally.check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fixed",
    [
        {"tau": 0.08, "query_aware": "flatten", "index_queries": "last"},
        {"tau": 0.3, "query_aware": "per_query", "index_queries": "middle"},
    ],
    ids=["flatten", "per_query"],
)
def test_compiled_search_equals_the_reference_on_cuda(cuda, fixed):
    tally, drawn = Tally(), Drawn()
    options = {"gamma": 0.8, "block_size": 32, "min_budget": 32, "max_budget": None, "pattern_queries": "last", **fixed}
    config = gpu_cases(1, **options)[0].config
    generator = torch.Generator().manual_seed(0)
    for length in (600, 1000, 777, 513):
        query, key = structured_inputs(generator, 1, 8, 2, length, length, 64)
        case = Case(query, key, config)
        expected = case.reference()
        result = case.to(cuda).search()
        again = case.to(cuda).search()
        assert_well_formed(result)
        assert all(torch.equal(*pair) for pair in zip(result.lists, again.lists, strict=True))
        assert_same_blocks(result, expected)
        tally.add_decisions(expected)
        assert_same_statistics(result, expected)
        drawn.add(expected)
    tally.check()
    assert drawn.sparse > 0


def poison():
    """What the next tensors on the GPU are allocated from holds NaN, to a kernel's eye: compiled code fills nothing by itself."""
    gc.collect()
    torch.cuda.empty_cache()
    # the allocator keeps small tensors (up to 1 MB) and large ones apart, and gives what fits best
    held = [torch.full((2**18,), float("nan"), device="cuda") for _ in range(16)]
    held += [
        torch.full((size,), float("nan"), device="cuda") for size in [2**7] * 2000 + [2**12] * 200 + [2**19] * 64 + [2**24] * 4
    ]
    del held


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rule", "tau", "padded", "scores"),
    [
        ("flatten", 0.3, False, {}),
        ("flatten", 0.3, True, {"window": 300, "softcap": 8.0}),
        ("per_query", 0.08, True, {}),
    ],
)
def test_reads_nothing_that_was_not_written(cuda, rule, tau, padded, scores):
    config = FlexPrefillConfig(0.8, tau, block_size=32, min_budget=32, max_budget=192 if padded else None, query_aware=rule)
    generator = torch.Generator().manual_seed(5)
    for q_len, kv_len in ((1, 1), (63, 63), (129, 129), (1000, 1000), (333, 800)):
        query, key = structured_inputs(generator, 1, 8, 2, q_len, kv_len, 64)
        mask = torch.rand(1, kv_len, generator=generator) < 0.9 if padded else None
        case = Case(query, key, config, scores, mask)
        expected = case.reference()
        there = case.to(cuda)
        there.search()  # compiles, which allocates too
        poison()
        assert torch.empty(1000, device=cuda).isnan().all()
        assert torch.empty(2**20, device=cuda).isnan().all()
        result = there.search()
        assert_well_formed(result)
        assert_same_blocks(result, expected)
        assert_same_statistics(result, expected)


@pytest.mark.gpu
def test_attention_reads_nothing_that_was_not_written(cuda):
    generator = torch.Generator().manual_seed(6)
    query, key = structured_inputs(generator, 1, 8, 2, 333, 1000, 64)
    value = torch.randn(1, 2, 1000, 64, generator=generator)
    query, key, value = (x.to(cuda, torch.bfloat16) for x in (query, key, value))
    options = {"gamma": 0.8, "tau": 0.3, "min_budget": 128, "dense_below": 0}
    with torch.no_grad():
        first = flexprefill_attention(query, key, value, **options)
        poison()
        again = flexprefill_attention(query, key, value, **options)
    assert torch.equal(first, again)
    assert first.isfinite().all()


@pytest.mark.gpu
def test_a_program_that_multiplies_in_tf32_gets_the_same_blocks(cuda, monkeypatch):
    """Where plain products choose the blocks; our kernels do not ask."""
    config = FlexPrefillConfig(0.8, 0.3, block_size=32, min_budget=32, selection="reference")
    query, key = structured_inputs(torch.Generator().manual_seed(7), 1, 8, 2, 704, 704, 64)
    case = Case(query, key, config).to(cuda)
    keep = case.search().keep
    exact = query[0, 0].to(cuda) @ key[0, 0].to(cuda).mT
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert not torch.equal(query[0, 0].to(cuda) @ key[0, 0].to(cuda).mT, exact)  # it is on
    assert torch.equal(case.search().keep, keep)
    assert torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("generic", ["none", "tf32"])
def test_tf32_is_put_back_as_it_was(generic):
    """A precision that the program set for matrix products, or for everything, where the one of products is inherited."""
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has no precision for everything")
    products = torch.backends.cuda.matmul
    before = torch.backends.fp32_precision, products.fp32_precision
    try:
        torch.backends.fp32_precision, products.fp32_precision = generic, "none" if generic == "tf32" else "tf32"
        assert products.fp32_precision == "tf32"
        with without_tf32():
            assert products.fp32_precision == "ieee"
        assert products.fp32_precision == "tf32"
        torch.backends.fp32_precision = "ieee"
        assert products.fp32_precision == ("ieee" if generic == "tf32" else "tf32")
    finally:
        torch.backends.fp32_precision, products.fp32_precision = before
