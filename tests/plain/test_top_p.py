"""Cumulative selection, against adding up one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmask.plain.top_p import ranks, top_p, top_p_count


def gamma_of(value):
    return torch.tensor(value, dtype=torch.float64)


def chosen_one_by_one(values, candidates, gamma):
    """Indices kept: heaviest first, lower indices first among equals, until gamma of the sum is reached."""
    order = sorted((i for i, is_one in enumerate(candidates) if is_one), key=lambda i: (-values[i], i))
    threshold, total, kept = gamma * sum(values[i] for i in order), 0.0, []
    for i in order:
        if total >= threshold:
            break
        total += values[i]
        kept.append(i)
    return kept


# whole numbers sum exactly
WHOLE = st.lists(st.tuples(st.integers(0, 8).map(float), st.booleans()), min_size=1, max_size=30)


@given(WHOLE, st.sampled_from([0.125, 0.25, 0.5, 0.75, 0.875]))
def test_keeps_the_fewest_that_reach_gamma(entries, gamma):
    values, candidates = torch.tensor([x for x, _ in entries]), torch.tensor([is_one for _, is_one in entries])
    expected = chosen_one_by_one(values.tolist(), candidates.tolist(), gamma)
    kept = top_p(values[None], candidates[None], gamma_of(gamma))[0]
    assert kept.nonzero().flatten().tolist() == sorted(expected)
    assert top_p_count(values[None], candidates[None], gamma_of(gamma)).tolist() == [len(expected)]


@given(WHOLE)
def test_ranks_order_candidates_first_and_equals_by_index(entries):
    values, candidates = torch.tensor([x for x, _ in entries]), torch.tensor([is_one for _, is_one in entries])
    order = sorted(range(len(entries)), key=lambda i: (not entries[i][1], -entries[i][0] if entries[i][1] else 0, i))
    places = ranks(values[None], candidates[None])[0].tolist()
    assert [places.index(place) for place in range(len(entries))] == order


@pytest.mark.parametrize("gamma", [0.9, 0.99])
def test_a_large_map_reaches_gamma(gamma):
    # a running float32 sum stops growing before it has added a million small shares
    count = 1_000_000
    values, candidates = torch.full((1, count), 1 / count), torch.ones(1, count).bool()
    kept = top_p(values, candidates, gamma_of(gamma))
    assert kept.sum().item() == pytest.approx(gamma * count, abs=1)
    assert kept[0, : int(gamma * count) - 1].all()
    assert top_p_count(values, candidates, gamma_of(gamma)).item() == pytest.approx(gamma * count, abs=1)


def test_nan_counts_as_nothing():
    values = torch.tensor([[float("nan"), 0.5, 0.3, 0.2]])
    assert top_p(values, torch.ones(1, 4).bool(), gamma_of(0.7)).tolist() == [[False, True, True, False]]
