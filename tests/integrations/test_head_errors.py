"""Errors of heads at each gamma against float64; the greedy choice of gammas."""

import itertools

import numpy as np
import pytest
import torch

from flexmask import block_masks
from flexmask.base.inputs import attention_inputs
from flexmask.integrations.tune.head_errors import errors_of_key_head, head_errors
from flexmask.integrations.tune.measured import AtGamma
from flexmask.integrations.tune.result import allocate
from flexmask.selector import selector_of
from tests.cases import structured_inputs
from tests.expected import masked_attention, pairs_under, seen_pairs

GAMMAS = (0.2, 0.5, 0.8, 1.0)
METHODS = {"hybrid": {"min_budget": 0}, "flexprefill": {"min_budget": 0, "tau": 0.12}}


def expected_errors(query, key, value, gamma, method, scores, sinks, gradient=None):
    """Density and error by head, in float64."""
    make_mask = getattr(block_masks, f"{method}_mask")
    length = query.shape[2]

    def attend(keep):
        return masked_attention(query, key, value, keep, scores.get("scale"), scores.get("softcap"), sinks)[0]

    mask, stats = make_mask(query, key, gamma, block_size=16, return_stats=True, **METHODS[method], **scores)
    dense = attend(seen_pairs(length, torch.zeros(1).long(), torch.ones(1, length).bool(), scores.get("window"))[:, None])
    change = attend(pairs_under(mask, length, length)) - dense
    if gradient is not None:
        return stats.density[0], (gradient.double() * change).sum(-1).square().sum(-1)[0]
    return stats.density[0], (change.square().sum((-2, -1)) / dense.square().sum((-2, -1)))[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("heads", "scores", "with_sinks", "max_mask_bytes"),
    [
        ((4, 2), {}, False, 2**30),
        ((4, 2), {}, False, 1),  # head by head
        ((4, 1), {"softcap": 3.0, "scale": 0.4}, False, 2**30),
        ((4, 4), {"window": 150}, True, 2**30),
    ],
    ids=["gqa", "groups", "softcap", "window-sinks"],
)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_errors_are_those_of_attention_under_the_masks(method, heads, scores, with_sinks, max_mask_bytes, with_gradient):
    generator = torch.Generator().manual_seed(3)
    query, key = structured_inputs(generator, 1, *heads, 250, 250, 16, sharpness=4.0)
    value = torch.randn(1, heads[1], 250, 24, generator=generator)
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    inputs = attention_inputs(query, key, value, sinks=sinks, **scores)
    selector = selector_of(method, 16, METHODS[method])
    # sizes far apart from head to head
    gradient = torch.randn(1, 4, 250, 24, generator=generator) * torch.tensor([1.0, 10.0, 0.1, 3.0])[:, None, None]
    gradient = gradient if with_gradient else None
    out, errors = head_errors(inputs, selector, GAMMAS, max_mask_bytes, gradient)
    assert out.shape == (1, 4, 250, 24)
    lost = []
    for at, gamma in enumerate(GAMMAS):
        density, wrong = expected_errors(query, key, value, gamma, method, scores, sinks, gradient)
        assert torch.tensor([each[at] for each in errors.density]) == pytest.approx(density, abs=1e-6)
        found = torch.tensor([each[at] for each in errors.error])
        torch.testing.assert_close(found, wrong, atol=1e-6, rtol=1e-3, check_dtype=False)
        lost.append(wrong)
    assert max(lost[0]) > 0.01  # something is lost to compare
    assert max(lost[-1]) == 0


def test_scores_far_apart_do_not_underflow():
    # the kept blocks hold exp(-300) of the attention
    query, key = torch.zeros(1, 1, 64, 16), torch.zeros(1, 1, 64, 16)
    query[..., 0], key[:, :, :32, 0] = 400.0, 3.0
    value = torch.cat([torch.ones(1, 1, 32, 16), torch.full((1, 1, 32, 16), 2.0)], 2)
    inputs = attention_inputs(query, key, value)
    keep = torch.tensor([[True, False], [False, True]]).view(1, 1, 2, 2)
    out = torch.empty(1, 64, 16)
    wrong = errors_of_key_head(inputs, keep, 32, out)
    assert torch.equal(out, torch.ones(1, 64, 16))
    assert float(wrong) == pytest.approx(0.5)  # half of the rows give 2 instead of 1


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_gammas_is_below_the_curve(seed):
    generator = torch.Generator().manual_seed(seed)
    number = 6
    kept, lost = torch.rand(2, number, len(GAMMAS), generator=generator).sort(-1).values / torch.tensor([number, 1]).view(2, 1, 1)
    kept[:, -1], lost = 1.0 / number, lost.flip(-1)
    lost[:, -1] = 0.0
    heads = [
        [AtGamma(*each) for each in zip(GAMMAS, *pair, strict=True)] for pair in zip(kept.tolist(), lost.tolist(), strict=True)
    ]
    way = allocate(heads)
    assert way.curve[0] == (pytest.approx(1.0), 0.0)
    for steps, (density, error) in enumerate(way.curve):
        at = way.after(steps)
        assert density == pytest.approx(sum(choice.blocks for choice in at))
        assert error == pytest.approx(sum(choice.error for choice in at) / number)
        assert way.steps_to_density(density + 1e-9) == way.steps_to_error(error) == steps
    every = itertools.product(*heads)
    others = np.array([[sum(choice.blocks for choice in at), sum(choice.error for choice in at) / number] for at in every])
    densities, errors = np.array(way.curve[::-1]).T
    reached = others[:, 0] >= densities[0]
    assert (others[reached, 1] >= np.interp(others[reached, 0], densities, errors) - 1e-6).all()
    assert way.steps_to_density(densities[0] / 2) is way.steps_to_error(-1.0) is None


def test_of_gammas_that_keep_the_same_the_most_exact_is_where_it_starts():
    head = [AtGamma(0.5, 0.2, 0.3), AtGamma(0.9, 1.0, 0.1), AtGamma(0.95, 1.0, 0.0), AtGamma(1.0, 1.0, 0.0)]
    way = allocate([head])
    assert way.highest == (head[3],)
    assert way.steps == ((pytest.approx(0.375), 0, head[0]),)
