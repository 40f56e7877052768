"""NaN and infinity spoil the head they are in, and nothing else."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import flexmask
from tests.cases import cases, published_cases
from tests.comparisons import assert_well_formed

VALUES = st.sampled_from([float("nan"), float("inf"), -float("inf")])


def assert_others_untouched(before, after, spoiled):
    """Lists and statistics of heads that are not `spoiled`, (batch, num_heads) bool, are the same to the bit."""
    for parts in zip(*((*each.lists, *vars(each.stats).values()) for each in (before, after)), strict=True):
        first, second = (part[~spoiled] for part in parts)
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def places(data, length):
    """Tokens: one, the last, or all."""
    one = st.integers(0, length - 1).map(lambda token: [token])
    return data.draw(one | st.just([length - 1]) | st.just(list(range(length))), label="tokens")


def spoil(case, data, name):
    """Write NaN or infinity into one head; results before and after, and which heads may differ."""
    before = case.search()
    batch, num_heads = case.query.shape[:2]
    inputs = {"query": case.query.clone(), "key": case.key.clone()}
    b, h = data.draw(st.integers(0, batch - 1)), data.draw(st.integers(0, inputs[name].shape[1] - 1))
    tokens = places(data, inputs[name].shape[2])
    dims = data.draw(st.sampled_from([slice(0, 1), slice(None)]))
    inputs[name][b, h, tokens, dims] = data.draw(VALUES)
    groups = num_heads // inputs[name].shape[1]
    spoiled = torch.zeros(batch, num_heads, dtype=torch.bool)
    spoiled[b, h * groups : (h + 1) * groups] = True
    return before, case.search(**inputs), spoiled


@pytest.mark.parametrize("name", ["query", "key"])
def test_spoils_its_own_head_only(name):
    @settings(max_examples=60)
    @given(cases() | published_cases(), st.data())
    def run(case, data):
        assume(case.query.shape[2] > 1)
        before, after, spoiled = spoil(case, data, name)
        assert_others_untouched(before, after, spoiled)
        assert_well_formed(after)

    run()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["query", "key"])
def test_spoils_its_own_head_only_on_cuda(cuda, name):
    @settings(max_examples=25, derandomize=True, database=None)
    @given(cases() | published_cases(), st.data())
    def run(case, data):
        before, after, spoiled = spoil(case.to(cuda), data, name)
        assert_others_untouched(before, after, spoiled.to(cuda))
        assert_well_formed(after)

    with torch.compiler.set_stance("force_eager"):
        run()


@pytest.mark.gpu
@pytest.mark.parametrize("token", [515, 8], ids=["of the last rows", "of the first rows"])
@pytest.mark.parametrize("name", ["query", "key"])
def test_a_spoiled_head_keeps_the_same_by_kernels_as_in_plain_steps(cuda, name, token):
    """A maximum drops NaN on a GPU."""
    generator = torch.Generator().manual_seed(0)
    inputs = {part: torch.randn(1, 2, 520, 64, generator=generator) for part in ("query", "key")}
    inputs[name][0, 1, token] = torch.nan
    masks = [
        flexmask.hybrid_mask(**{part: x.to(device) for part, x in inputs.items()}, gamma=0.5, block_size=32, min_budget=0)
        for device in ("cpu", cuda)
    ]
    plain, by_kernels = (mask.to_dense()[0, 1].cpu() for mask in masks)
    assert torch.equal(plain, by_kernels)
