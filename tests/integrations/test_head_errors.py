"""Errors of heads at each gamma against float64; the greedy choice of gammas."""

import itertools

import numpy as np
import pytest
import torch

from flexmask import block_masks
from flexmask.base.inputs import attention_inputs
from flexmask.integrations.tune.head_errors import HeadErrors, errors_of_key_head, head_errors
from flexmask.integrations.tune.measured import MeasuredErrors
from flexmask.integrations.tune.result import result_of
from flexmask.selector import selector_of
from flexmask.settings import PrefillSettings
from tests.cases import structured_inputs
from tests.expected import masked_attention, pairs_under, seen_pairs

GAMMAS = (0.2, 0.5, 0.8, 1.0)
METHODS = {"hybrid": {"min_budget": 0}, "flexprefill": {"min_budget": 0, "tau": 0.12}}


def expected_errors(query, key, value, gamma, method, scores, sinks, gradient=None):
    """Density and error by head, in float64."""
    make_mask = getattr(block_masks, f"{method}_mask")
    length = query.shape[2]

    def output_under(keep):
        return masked_attention(query, key, value, keep, scores.get("scale"), scores.get("softcap"), sinks)[0]

    mask, stats = make_mask(query, key, gamma, block_size=16, return_stats=True, **METHODS[method], **scores)
    dense = output_under(seen_pairs(length, torch.zeros(1).long(), torch.ones(1, length).bool(), scores.get("window"))[:, None])
    change = output_under(pairs_under(mask, length, length)) - dense
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


def result_at_no_target(gammas, kept, lost):
    """As measured in one layer of one prompt; `kept` and `lost` are by head and gamma."""
    return result_of(PrefillSettings(), MeasuredErrors(gammas, [{0: HeadErrors(1, kept, lost)}], [True]), 1.0, None)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_gammas_is_below_the_curve(seed):
    generator = torch.Generator().manual_seed(seed)
    number = 6
    kept, lost = torch.rand(2, number, len(GAMMAS), generator=generator).sort(-1).values
    kept[:, -1], lost = 1.0, lost.flip(-1)
    lost[:, -1] = 0.0
    result = result_at_no_target(GAMMAS, kept.tolist(), lost.tolist())
    assert result.curve[0] == (pytest.approx(1.0), 0.0)
    for density, error in result.curve:
        for at_target in (result.at(density=density), result.at(error=error)):
            assert (at_target.density, at_target.error) == (density, error)
            assert np.mean([row["density"] for row in at_target.rows()]) == pytest.approx(density)
            assert np.mean([row["error"] for row in at_target.rows()]) == pytest.approx(error)
    choices = np.array(list(itertools.product(range(len(GAMMAS)), repeat=number)))
    others = np.stack([x.numpy()[range(number), choices].mean(1) for x in (kept, lost)], 1)
    densities, errors = np.array(result.curve[::-1]).T
    reached = others[:, 0] >= densities[0]
    assert (others[reached, 1] >= np.interp(others[reached, 0], densities, errors) - 1e-6).all()


def test_of_gammas_that_keep_the_same_the_most_exact_is_where_it_starts():
    result = result_at_no_target((0.5, 0.9, 0.95, 1.0), [[0.2, 1.0, 1.0, 1.0]], [[0.3, 0.1, 0.0, 0.0]])
    assert [row["gamma"] for row in result.rows()] == [1.0]
    assert result.curve == ((1.0, 0.0), (pytest.approx(0.2), 0.3))
