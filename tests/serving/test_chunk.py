"""One request's chunk: its keys after the cached ones, and the core's own attention in the engine's layout."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters as dynamo_counters

from flexmask import sparse_attention
from flexmask.integrations.serving import chunk as chunk_module
from flexmask.integrations.serving.chunk import SparseRequest, attend_chunk, concat_cached
from flexmask.integrations.serving.counters import SAMPLED_STATISTICS, Counters
from flexmask.integrations.serving.startup import warm_up
from tests.serving.layers import CPU, SHAPE, SPARSE, sparse_role


def chunk(rows, tokens=420):
    return torch.randn(rows, 4, 32), torch.randn(2, tokens, 32), torch.randn(2, tokens, 32)


def by_the_core(query, key, value, **options):
    return sparse_attention(query.transpose(0, 1)[None], key[None], value[None], scale=0.2, return_stats=True, **options)


@pytest.mark.attention
def test_calls_after_the_warm_up_are_the_core_s_and_compile_nothing():
    role = sparse_role(**SPARSE)
    with torch.inference_mode():
        assert warm_up([role, role], (600, 2000), CPU, torch.float32, True) > 0
        compiled = dynamo_counters["stats"]["unique_graphs"]
        for rows in (150, 420, 32):  # a chunk, a prompt, a chunk of one block
            given = chunk(rows)
            ours = attend_chunk(role, *given, statistics=SAMPLED_STATISTICS)
            expected, stats = by_the_core(*given, dense_below=0, **SPARSE)
            torch.testing.assert_close(ours.out.transpose(0, 1), expected[0])
            for name in SAMPLED_STATISTICS:
                torch.testing.assert_close(getattr(ours.stats, name), getattr(stats, name))
            assert ours.stats.density.mean() < 0.9
            assert attend_chunk(role, *given).stats is None
    assert dynamo_counters["stats"]["unique_graphs"] == compiled


@pytest.mark.attention
@pytest.mark.usefixtures("without_kernel")
def test_a_chunk_selects_by_the_length_of_its_prompt():
    role, given = sparse_role(**SPARSE), chunk(150)
    requests = [SparseRequest(0, 0, 150, 420, tokens) for tokens in (None, 420, 4200)]
    found = [attend_chunk(role, *given, request=each, statistics=("density",)).stats for each in requests]
    expected = by_the_core(*given, dense_below=0, prompt_len=4200, **SPARSE)[1]
    assert torch.equal(found[2].density, expected.density)
    assert torch.equal(found[0].density, found[1].density) and (found[1].density < expected.density).all()


@pytest.mark.attention
@pytest.mark.usefixtures("without_kernel")
def test_layers_of_one_kind_share_the_plan_of_a_chunk(monkeypatch):
    roles = [sparse_role(**SPARSE), sparse_role(**SPARSE), sparse_role(**{**SPARSE, "gamma": 0.5})]
    made, request = [], SparseRequest(0, 0, 150, 420)
    plan_call = chunk_module.plan_call
    monkeypatch.setattr(chunk_module, "plan_call", lambda *given, **named: made.append(given) or plan_call(*given, **named))
    for role in [*roles, *(role.with_gamma(0.5) for role in roles)]:
        given = chunk(150)
        shared = attend_chunk(role, *given, request=request, statistics=("density",)).stats
        assert torch.equal(shared.density, attend_chunk(role, *given, statistics=("density",)).stats.density)
    assert roles[0].with_gamma(0.5) is roles[0].with_gamma(0.5)  # its kind is computed once
    assert len(request.plans) == 2
    assert len(made) == 2 + 6  # those shared, and one for each call without


@pytest.mark.attention
@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize(
    "options", [{"method": "flexprefill", "gamma": 0.3, "min_budget": 0}, {"method": "streaming_llm", "window_blocks": 2}]
)
def test_windows_groups_of_heads_and_every_method_are_the_core_s(options):
    run = {**options, "block_size": 32, "max_mask_bytes": 1, "dense_below": 0}
    role = sparse_role(replace(SHAPE, window=300), **run)
    for rows in (150, 420):
        given = chunk(rows)
        ours, counters = attend_chunk(role, *given, statistics=("density",), with_counts=True), Counters()
        _, stats = by_the_core(*given, window=300, **run)
        torch.testing.assert_close(ours.stats.density, stats.density)
        counters.add_call(role, ours, rows, 420)
        assert counters.density == pytest.approx(float(stats.density.mean())) and counters.density < 1


@pytest.mark.parametrize("skipped", [0, 5])
@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, 0.03, torch.tensor(0.03), torch.tensor([0.5, 0.03, 7.0])])
def test_own_rows_stand_after_the_cached_ones_which_alone_are_scaled_and_rounded_once(cache, dtype, scale, skipped):
    own, cached = torch.randn(7, 3, 8).to(dtype), torch.randn(40, 3, 8).to(cache or dtype).transpose(0, 1)
    made = concat_cached(cached, own, scale, skipped)
    assert made.is_contiguous()
    # 0.03 is no number of bfloat16: a scale in the dtype of the rows is off by up to 2**-9
    before = (cached.double() * torch.as_tensor(1 if scale is None else scale).float().view(-1, 1, 1)).to(dtype)
    assert torch.equal(made, torch.cat([before.new_zeros(3, skipped, 8), before, own.transpose(0, 1)], 1))
    # a cache is written to in place: rows after nothing are copied
    alone = concat_cached(None, own)
    assert alone.is_contiguous() and alone.data_ptr() != own.data_ptr()
    assert torch.equal(alone, own.transpose(0, 1))
