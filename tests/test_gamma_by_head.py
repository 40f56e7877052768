"""A gamma per head: each head's blocks are those of a call with its gamma, in whatever form."""

import pytest
import torch
from torch import Tensor

from flexmask import flexprefill_mask
from tests.cases import mask_function, structured_inputs
from tests.compile_support import assert_same_lists, traced
from tests.compile_support import fresh_compiler as fresh_compiler

GAMMAS = (0.43, 1.0, 0.71, 0.91)
OPTIONS = {"block_size": 16, "min_budget": 0}


def inputs(length: int = 240, seed: int = 18) -> tuple[Tensor, Tensor]:
    return structured_inputs(torch.Generator().manual_seed(seed), 1, 4, 2, length, length, 32, sharpness=5.0)


RULES = {
    "vertical-slash": {"tau": 0.0}, "flatten": {"tau": 1.0}, "per_query": {"tau": 1.0, "query_aware": "per_query"},
    "published": {"method": "published", "tau": 0.1, "block_size": 128, "min_budget": 128}, "hybrid": {"method": "hybrid"},
}  # fmt: skip


@pytest.mark.parametrize("form", [list, tuple, torch.tensor], ids=["list", "tuple", "tensor"])
@pytest.mark.parametrize("rule", RULES)
def test_each_head_has_the_blocks_of_its_own_gamma(rule, form):
    options = {**OPTIONS, **RULES[rule]}
    make = mask_function(options.pop("method", "flexprefill"))
    query, key = inputs(1280 if rule == "published" else 400 if rule == "hybrid" else 240)
    # exact in float32
    gammas = (0.25, 1.0, 0.5, 0.75)
    mask, stats = make(query, key, form(gammas), return_stats=True, **options)
    alone = [make(query, key, gamma, **options).to_dense()[:, head] for head, gamma in enumerate(gammas)]
    assert torch.equal(mask.to_dense(), torch.stack(alone, 1)) and stats.density[0, 1] == 1
    assert (stats.density[0, [0, 2]] < 0.9).all()


def test_gammas_of_a_tensor_are_clamped_and_nan_keeps_everything():
    query, key = inputs()
    wild = torch.tensor([-3.0, float("inf"), float("nan"), 0.0])
    tame = torch.tensor([2.0**-30, 1.0, 1.0, 2.0**-30])
    for options in RULES["vertical-slash"], RULES["flatten"], RULES["per_query"]:
        masks = [flexprefill_mask(query, key, gamma, **OPTIONS, **options) for gamma in (wild, tame, [1e-9, 1, 1, 1e-9])]
        for other in masks[1:]:
            assert_same_lists(masks[0], other)
    assert wild.isnan().any()


@pytest.mark.parametrize("rule", ["flatten", "per_query"])
def test_gamma_one_keeps_blocks_that_no_row_attends_to(rule):
    query, key = torch.zeros(1, 1, 96, 16), torch.zeros(1, 1, 96, 16)
    query[..., 0], key[:, :, :16, 0] = 100, 100  # all attention to the first block, the others' underflows
    kept = flexprefill_mask(query, key, torch.ones(1), **OPTIONS, **RULES[rule]).to_dense()
    assert torch.equal(kept[0, 0].bool(), torch.ones(6, 6).tril().bool())


def test_gammas_are_traced_and_compiled_once():
    def mask(query, key, gamma):
        return flexprefill_mask(query, key, gamma, 0.1, block_size=32, min_budget=0)

    run, counter = traced(mask)
    query, key = inputs(200)
    for step in range(1, 6):
        gamma = torch.tensor(GAMMAS).roll(step)
        assert_same_lists(run(query, key, gamma), mask(query, key, gamma))
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("form", [tuple, torch.tensor], ids=["tuple", "tensor"])
def test_nothing_waits_for_the_gpu(cuda, nothing_waits, form):
    query, key = (x.to(cuda) for x in inputs(700))
    gamma = form(GAMMAS)
    gamma = gamma.to(cuda) if isinstance(gamma, Tensor) else gamma
    flexprefill_mask(query, key, gamma, block_size=64, min_budget=0)  # compiles, which may wait
    other = gamma.roll(1) if isinstance(gamma, Tensor) else gamma[1:] + gamma[:1]
    with nothing_waits():
        for each in (gamma, other):
            mask = flexprefill_mask(query, key, each, block_size=64, min_budget=0)
    expected = flexprefill_mask(
        query.cpu(), key.cpu(), other.cpu() if isinstance(other, Tensor) else other, block_size=64, min_budget=0
    )
    assert torch.equal(mask.kv_num_blocks.cpu(), expected.kv_num_blocks)
