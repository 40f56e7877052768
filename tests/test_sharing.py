"""share_kv_heads: one mask for the query heads of a key head, against the reference and by what each way of sharing promises."""

import pytest
import torch
from hypothesis import example, given, settings

from flexmask import FlexPrefillConfig, flexprefill_mask, search
from flexmask.sharing import for_every_head, group_any, group_mean
from tests.cases import Case, cases, published_cases, sparse_cases, structured_inputs
from tests.comparisons import Drawn, Tally, assert_honest, assert_same_blocks, assert_same_statistics, assert_well_formed

WAYS = ["union", "mean"]
ROUNDING = 1e-5
SHAPES = [(2, 1), (4, 1), (4, 2), (6, 2)]


def compare(case, tally, drawn=None):
    """Both sides of one case, compared; they come back for more to be asked of them."""
    result, expected = case.search(), case.reference()
    assert_well_formed(result)
    assert_same_blocks(result, expected)
    assert_same_statistics(result, expected)
    tally.add_decisions(expected)
    if drawn is not None:
        drawn.add(expected)
    return result, expected


def by_group(x, case, dim=1):
    """The heads of each key head in a dimension of their own, after that of the key heads."""
    return x.unflatten(dim, (case.key.shape[1], -1))


# Against the reference


def test_equals_the_reference():
    tally = Tally()

    @settings(max_examples=120)
    @given(cases(share_kv_heads="union") | cases(share_kv_heads="mean"))
    def run(case):
        compare(case, tally)

    run()
    tally.check()


def sharp_case(share, heads, length, seed, variant):
    """A call with room to drop blocks where it is long enough: plain, padded, windowed or a chunk with an offset."""
    size = 16 if length < 500 else 64
    batch, q_len = (2, length) if variant == "padding" else (1, length)
    if variant == "offset":
        q_len = (length + 1) // 2
    generator = torch.Generator().manual_seed(1000 * seed + length)
    # in a few blocks, sharp rows are all but alike, and which goes first is a matter of rounding
    query, key = structured_inputs(generator, batch, *heads, q_len, length, 64, sharpness=1.0 if length < 100 else 5.0)
    tau, rule = ((0.2, "flatten"), (0.6, "per_query"))[seed % 2]
    config = FlexPrefillConfig(0.61, tau, block_size=size, min_budget=0, query_aware=rule, share_kv_heads=share)
    case = Case(query, key, config)
    if variant == "padding":
        slot = torch.arange(length)
        case.attention_mask = torch.stack([slot >= length // 5, (slot % 7 != 3) | (slot == length - 1)])
    elif variant == "window":
        case.scores = {"window": max(2, 2 * length // 3)}
    elif variant == "offset":
        case.q_offset = (length - q_len) // 2
    return case


@pytest.mark.parametrize("share", WAYS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
def test_equals_the_reference_at_every_group_size(share, heads):
    tally, drawn = Tally(), {1: Drawn(), 63: Drawn(), 129: Drawn(), 1000: Drawn()}
    for length in drawn:
        for variant in ("plain", "padding", "window", "offset"):
            for seed in range(2):
                compare(sharp_case(share, heads, length, seed, variant), tally, drawn[length])
    tally.check()
    for length in (129, 1000):
        assert drawn[length].sparse > 0 and drawn[length].query_aware > 0


def test_union_equals_the_reference_in_published_selection():
    tally, drawn = Tally(), Drawn()

    @settings(max_examples=30)
    @given(published_cases(max_budget=None, share_kv_heads="union"))
    def run(case):
        result, expected = case.search(), case.reference()
        assert_well_formed(result)
        assert_same_blocks(result, expected)
        assert_same_statistics(result, expected, underflow=True)
        tally.add_decisions(expected)
        drawn.add(expected)

    run()
    tally.check()
    assert drawn.sparse > 0.5 * drawn.heads


@pytest.mark.parametrize("fault", ["a member left out", "a neighbour's mask", "unequal weights"])
def test_a_fault_is_found(monkeypatch, fault):
    share = "mean" if fault == "unequal weights" else "union"
    case = sharp_case(share, (4, 1), 1000, 2, "plain")
    expected = case.reference()
    assert not assert_same_blocks(case.search(), expected).any()

    def first_but_one(x, groups, dim=1):
        return x.unflatten(dim, (-1, groups)).narrow(dim + 1, 1, groups - 1).any(dim + 1)

    def weighted(x, groups, dim=1):
        weight = torch.arange(1.0, groups + 1).reshape(-1, *[1] * (x.dim() - dim - 1))
        return (x.unflatten(dim, (-1, groups)) * weight / weight.sum()).sum(dim + 1)

    if fault == "a member left out":
        monkeypatch.setattr(search, "group_any", first_but_one)
    elif fault == "unequal weights":
        monkeypatch.setattr(search, "group_mean", weighted)
    else:
        monkeypatch.setattr(search, "for_every_head", lambda x, groups, dim=1: for_every_head(x, groups, dim).roll(1, -1))
    with pytest.raises(AssertionError, match="blocks differ"):
        assert_same_blocks(case.search(), expected)


# What sharing promises


@pytest.mark.parametrize("share", WAYS)
def test_heads_of_a_group_have_one_mask(share):
    differed = []

    @settings(max_examples=40)
    @given(cases(share_kv_heads=share))
    def run(case):
        result = case.search()
        for x in (result.keep, *result.lists):
            grouped = by_group(x, case)
            assert torch.equal(grouped, grouped[:, :, :1].expand_as(grouped))
        own = by_group(case.with_config(share_kv_heads=None).search().keep, case)
        differed.append(not torch.equal(own, own[:, :, :1].expand_as(own)))

    run()
    assert any(differed)


def test_union_is_what_any_head_of_the_group_keeps():
    grew = []

    @settings(max_examples=40)
    @given(cases(share_kv_heads="union") | sparse_cases(share_kv_heads="union"))
    @example(sharp_case("union", (8, 2), 300, 0, "plain"))  # draws alone may lack what is asserted below
    def run(case):
        shared, own = case.search(), case.with_config(share_kv_heads=None).search()
        assert torch.equal(by_group(shared.keep, case)[:, :, 0], by_group(own.keep, case).any(2))
        # what each head chose stays to be read
        for name in ("is_query_aware", "js_distance", "num_vertical_blocks", "num_slash_blocks"):
            torch.testing.assert_close(getattr(shared.stats, name), getattr(own.stats, name), rtol=0, atol=0, equal_nan=True)
        assert (shared.stats.density >= own.stats.density).all()
        assert (shared.stats.coverage >= own.stats.coverage).all()
        grew.append(bool((shared.stats.coverage > own.stats.coverage).any()))

    run()
    assert any(grew)


def test_mean_holds_gamma_of_the_mean():
    least = []

    @settings(max_examples=40)
    @given(sparse_cases(tau=0.0, share_kv_heads="mean"))
    def run(case):
        coverage = by_group(case.search().stats.coverage, case).mean(-1)
        assert (coverage >= case.config.gamma - ROUNDING).all()
        least.append(coverage.min().item())

    run()
    assert min(least) < 0.95


def test_a_head_unlike_its_group_is_held_by_the_union_and_not_by_the_mean():
    # three heads look at a key of block 3, the fourth at one of block 9: gamma .7 of the mean is reached without it
    query, key = torch.zeros(1, 4, 256, 16), torch.zeros(1, 1, 256, 16)
    key[0, 0, 50, 0] = key[0, 0, 150, 1] = 1
    query[0, :3, :, 0] = query[0, 3, :, 1] = 100
    case = Case(query, key, FlexPrefillConfig(0.7, 0.0, block_size=16, min_budget=0))
    own, union, mean = (case.with_config(share_kv_heads=share).search().stats for share in (None, *WAYS))
    assert (own.coverage > 0.9).all() and (union.coverage > 0.9).all()
    assert (mean.coverage[0, :3] > 0.9).all() and mean.coverage[0, 3] < 0.1
    assert own.density.max() < mean.density.min() + 1e-6 < union.density.min()


def test_mean_decides_once_for_a_group():
    both = []

    @settings(max_examples=40)
    @given(sparse_cases(share_kv_heads="mean"))
    @example(sharp_case("mean", (8, 2), 300, 0, "plain"))  # draws alone may lack what is asserted below
    def run(case):
        stats = case.search().stats
        for name in ("is_query_aware", "js_distance", "num_vertical_blocks", "num_slash_blocks", "density"):
            grouped = by_group(getattr(stats, name), case)
            torch.testing.assert_close(grouped, grouped[:, :, :1].expand_as(grouped), rtol=0, atol=0, equal_nan=True)
        own = by_group(case.with_config(share_kv_heads=None).search().stats.is_query_aware, case)
        both.append(bool((own.any(-1) & ~own.all(-1)).any()))

    run()
    assert any(both)


@pytest.mark.parametrize("share", WAYS)
def test_heads_with_keys_of_their_own_share_nothing(share):
    generator = torch.Generator().manual_seed(5)
    query, key = structured_inputs(generator, 2, 4, 4, 200, 230, 32, sharpness=5.0)
    alone = Case(query, key, FlexPrefillConfig(0.6, 0.3, block_size=16, min_budget=0))
    shared, own = alone.with_config(share_kv_heads=share).search(), alone.search()
    for got, wanted in zip((*shared.lists, *shared.stats), (*own.lists, *own.stats), strict=True):
        assert torch.equal(got, wanted)
    assert (own.stats.density < 0.9).any()
    # heads that do share keys are another matter
    grouped = Case(query, key[:, :2], alone.config)
    assert not torch.equal(grouped.with_config(share_kv_heads=share).search().keep, grouped.search().keep)


def test_joining_a_group_of_one_changes_nothing():
    x = torch.rand(2, 3, 5)
    assert torch.equal(group_mean(x, 1), x)
    assert torch.equal(group_any(x > 0.5, 1), x > 0.5)
    assert torch.equal(for_every_head(x, 1), x)


def test_what_is_joined_comes_back_to_its_own_heads():
    x = torch.arange(24.0).reshape(2, 6, 2)
    assert torch.equal(group_mean(x, 3)[:, 0], x[:, :3].mean(1))
    back = for_every_head(group_mean(x, 3), 3)
    assert torch.equal(back[:, 2], back[:, 0]) and not torch.equal(back[:, 3], back[:, 0])
    assert torch.equal(group_mean(x, 2, dim=2), x.mean(2, keepdim=True))


# What is made of it


@pytest.mark.parametrize("share", WAYS)
def test_mask_is_honest_and_has_all_heads(share):
    query, key = structured_inputs(torch.Generator().manual_seed(1), 2, 6, 2, 150, 200, 32, sharpness=5.0)
    padding = torch.arange(200)[None] >= torch.tensor([[0], [41]])
    options = {"gamma": 0.5, "block_size": 16, "min_budget": 0, "attention_mask": padding, "q_offset": 21}
    mask, stats = flexprefill_mask(query, key, share_kv_heads=share, return_stats=True, **options)
    assert mask.shape[1] == mask.kv_num_blocks.shape[1] == 6
    assert (stats.density < 0.9).any()
    assert_honest(mask, (150, 200))


# On a GPU


def gpu_cases(share):
    """Fixed cases, so that a GPU's run can be repeated."""
    found = []

    @settings(max_examples=20, derandomize=True, database=None)
    @given(sparse_cases(share_kv_heads=share) | cases(share_kv_heads=share))
    def run(case):
        found.append(case)

    run()
    found += [sharp_case(share, heads, 1000, seed, "plain") for heads in SHAPES for seed in range(3)]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("share", WAYS)
def test_equals_the_reference_on_cuda(cuda, share):
    tally = Tally()
    # every set of options would be compiled; what the compiler makes of the search is the next test's
    with torch.compiler.set_stance("force_eager"):
        for case in gpu_cases(share):
            expected, result = case.reference(), case.to(cuda).search()
            assert_well_formed(result)
            assert_same_blocks(result, expected)
            assert_same_statistics(result, expected)
            tally.add_decisions(expected)
    tally.check()


@pytest.mark.gpu
@pytest.mark.parametrize("share", WAYS)
def test_compiled_search_equals_the_reference_on_cuda(cuda, share):
    tally, drawn = Tally(), Drawn()
    for num_heads, length in ((4, 600), (8, 1000), (8, 777), (8, 513)):
        query, key = structured_inputs(torch.Generator().manual_seed(length), 1, num_heads, 2, length, length, 64, sharpness=5.0)
        case = Case(query, key, FlexPrefillConfig(0.61, 0.45, block_size=32, min_budget=32, share_kv_heads=share))
        expected, result = case.reference(), case.to(cuda).search()
        assert_well_formed(result)
        assert_same_blocks(result, expected)
        assert_same_statistics(result, expected)
        tally.add_decisions(expected)
        drawn.add(expected)
    tally.check()
    assert drawn.sparse > 0 and drawn.query_aware > 0
