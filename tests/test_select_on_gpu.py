"""The selection on a GPU: against the reference, in memory full of NaN, in a program with TF32."""

import gc

import pytest
import torch
from hypothesis import given, settings

from flexmask import hybrid_mask
from tests.attention_calls import flexprefill_attention
from tests.cases import Case, Config, cases, lower_thresholds, sparse_cases, structured_inputs
from tests.comparisons import Drawn, assert_as_the_oracle, assert_equal_lists, assert_same_blocks, assert_well_formed
from tests.compile_support import assert_same_lists

pytestmark = pytest.mark.gpu


def gpu_cases(count, **fixed):
    """Fixed cases: a GPU's run can be repeated."""
    found = []

    @settings(max_examples=count, derandomize=True, database=None)
    @given(sparse_cases(**fixed) | cases(**fixed))
    def run(case):
        found.append(case)

    run()
    return found


@pytest.mark.parametrize("part", range(4))
def test_equals_the_reference_on_cuda(cuda, part):
    drawn = Drawn()
    for case in [*gpu_cases(60), *gpu_cases(20, method="hybrid", max_budget=None)][part::4]:
        assert_as_the_oracle(case.to(cuda).select(), case.reference(), drawn)
    drawn.check_close()


@pytest.mark.parametrize(
    "fixed",
    [
        {"tau": 0.08, "query_aware": "flatten", "index_queries": "last"},
        {"tau": 0.3, "query_aware": "per_query", "index_queries": "middle"},
        {"method": "hybrid", "row_stride": 8, "min_budget": 90},
        {"method": "published", "tau": 0.3},
    ],
    ids=["flatten", "per_query", "hybrid", "published"],
)
def test_prompts_of_many_blocks_equal_the_reference_on_cuda(cuda, fixed):
    published, generator, drawn = fixed.get("method") == "published", torch.Generator().manual_seed(0), Drawn()
    config = Config(0.8, block_size=32, **{"min_budget": 32, **fixed})
    # from 36 blocks on row evidence has tiles that touch no edge; the published code takes whole blocks
    for length in (512, 640, 1024) if published else (600, 1000, 777, 513, 1200):
        case = Case(*structured_inputs(generator, 1, 8, 2, length, length, 64, sharpness=4.0 if published else 1.0), config)
        result = case.to(cuda).select()
        assert_equal_lists(result, case.to(cuda).select())
        assert_as_the_oracle(result, case.reference(), drawn, underflow=published)
    drawn.check_close()
    assert drawn.sparse > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_where_query_is():
    query, key = structured_inputs(torch.Generator().manual_seed(8), 1, 4, 2, 300, 300, 64)
    case = Case(query, key, Config(0.8, 0.3, block_size=32, min_budget=32))
    torch.cuda.set_device(0)
    result = case.to(torch.device("cuda", 1)).select()
    assert result.lists[0].device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    assert_well_formed(result)
    assert_same_blocks(result, case.reference())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [192, 256, 512])
@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("method", ["flexprefill", "hybrid"])
def test_wide_heads_fit_into_shared_memory(cuda, method, block_size, head_dim, dtype):
    query, key = (x.to(dtype) for x in structured_inputs(torch.Generator().manual_seed(9), 1, 4, 2, 900, 900, head_dim))
    case = Case(query, key, Config(0.8, 0.3, block_size=block_size, min_budget=block_size, method=method))
    with lower_thresholds(0.3):
        result = case.to(cuda).select()
        assert_well_formed(result)
        assert_same_blocks(result, case.reference())


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        *((tokens, {"block_size": 16, "min_budget": 0}) for tokens in (1920, 4000, 8000)),
        # Inductor 2.11 cannot fuse a comparison with gammas by head into split running sums
        (4096, {"method": "published", "block_size": 32, "min_budget": 32}),
    ],
    ids=["small map", "medium map", "large map", "published"],
)
def test_maps_of_every_size_keep_what_plain_steps_keep(cuda, tokens, options):
    query, key = structured_inputs(torch.Generator().manual_seed(4), 1, 4, 2, tokens, tokens, 32, sharpness=4.0)
    case = Case(query, key, Config([0.5, 0.6, 0.7, 0.8], 1.0, **options))
    plain, found = case.select(), case.to(cuda).select()
    assert found.stats.is_query_aware.any() and 0.01 < plain.keep.float().mean() < 0.5
    # rounding may decide a block at the boundary
    assert (found.keep.cpu() != plain.keep).float().mean() < 1e-3


@pytest.mark.parametrize("window", [None, 700])
def test_a_compiled_chunk_selects_by_the_length_of_its_prompt(cuda, window):
    query, key = (x.to(cuda) for x in structured_inputs(torch.Generator().manual_seed(5), 1, 4, 2, 320, 640, 32, sharpness=5.0))
    options = {"gamma": 0.95, "block_size": 32, "min_budget": 0, "min_coverage": 0.0, "last_rows_dense": False, "window": window}
    compiled = torch.compile(hybrid_mask, fullgraph=True)
    kept = []
    for prompt_len in (None, 640, 1280, 6400):
        expected = hybrid_mask(query, key, **options, prompt_len=prompt_len)
        assert_same_lists(compiled(query, key, **options, prompt_len=prompt_len), expected)
        kept.append(int((expected.kv_num_blocks + expected.full_kv_num_blocks).sum()))
    assert kept[0] == kept[1] < kept[2] <= kept[3]


def poison():
    """Fill the GPU memory of the next tensors with NaN."""
    gc.collect()
    torch.cuda.empty_cache()
    # the allocator keeps small tensors (up to 1 MB) apart
    held = [torch.full((2**18,), float("nan"), device="cuda") for _ in range(16)]
    held += [
        torch.full((size,), float("nan"), device="cuda") for size in [2**7] * 2000 + [2**12] * 200 + [2**19] * 64 + [2**24] * 4
    ]
    del held


@pytest.mark.parametrize(
    ("rule", "tau", "padded", "scores"),
    [
        ("flatten", 0.3, False, {}), ("flatten", 0.3, True, {"window": 300, "softcap": 8.0}), ("per_query", 0.08, True, {}),
        ("hybrid", 0.0, True, {"window": 300, "softcap": 8.0}),
    ],
)  # fmt: skip
def test_reads_nothing_that_was_not_written(cuda, rule, tau, padded, scores):
    rules = {"method": rule} if rule == "hybrid" else {"query_aware": rule, "max_budget": 192 if padded else None}
    config = Config(0.8, tau, block_size=32, min_budget=32, **rules)
    generator = torch.Generator().manual_seed(5)
    for q_len, kv_len in ((1, 1), (63, 63), (129, 129), (1000, 1000), (333, 800)):
        query, key = structured_inputs(generator, 1, 8, 2, q_len, kv_len, 64)
        mask = torch.rand(1, kv_len, generator=generator) < 0.9 if padded else None
        case = Case(query, key, config, scores, mask)
        expected = case.reference()
        there = case.to(cuda)
        there.select()  # compiles, which allocates too
        poison()
        assert torch.empty(1000, device=cuda).isnan().all()
        assert torch.empty(2**20, device=cuda).isnan().all()
        assert_as_the_oracle(there.select(), expected)


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
