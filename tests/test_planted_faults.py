"""The comparisons of other tests can fail: each catches a wrong block that is planted."""

import functools
import inspect
from types import SimpleNamespace

import pytest
import torch

from flexmask import plain
from flexmask.base.inputs import attention_inputs
from flexmask.base.selection import BlockLists, ascending_indices, block_lists
from flexmask.block_masks import hybrid
from flexmask.flex.block_mask import block_mask_from_lists, visible_mask_mod
from flexmask.flex.run import run_flex_attention
from tests.cases import Case, Config, structured_inputs
from tests.comparisons import (
    assert_consistent,
    assert_same_attention,
    assert_same_blocks,
    assert_same_statistics,
    assert_well_formed,
)
from tests.expected import by_block, expanded, masked_attention, visible_pairs

BLOCK = 16
# heads of both kinds that drop blocks: whole, unpadded
INPUTS = structured_inputs(torch.Generator().manual_seed(18), 1, 4, 2, 200, 200, 32)
CASE = Case(*INPUTS, Config(0.5, 0.08, block_size=BLOCK, min_budget=0))
RESULT, EXPECTED = CASE.select(), CASE.reference()
VISIBLE, FULL = (by_block(visible_pairs(CASE), BLOCK, every) for every in (False, True))
PICKS = range(3)


def pick(candidates, number):
    places = candidates.nonzero().tolist()
    return tuple(places[(number * 7919) % len(places)])


def dropped(number, candidates=RESULT.keep, value=False):
    keep = RESULT.keep.clone()
    keep[pick(candidates, number)] = value
    return keep, block_lists(keep, FULL)


def added(number):
    return dropped(number, ~RESULT.keep & VISIBLE, True)


def swapped(number):
    lists = RESULT.lists
    return RESULT.keep, BlockLists(*lists[2:], *lists[:2])


def relabelled(number):
    full = FULL.expand_as(RESULT.keep).clone()
    full[pick(RESULT.keep & ~FULL, number)] = True
    return RESULT.keep, BlockLists(*ascending_indices(RESULT.keep & ~full), *ascending_indices(RESULT.keep & full))


FAULTS = [dropped, added, swapped, relabelled]
faults = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)


def test_without_a_fault_both_kinds_of_heads_drop_blocks_as_the_oracle():
    assert not assert_same_blocks(RESULT, EXPECTED).any() and (EXPECTED.density < 0.9).all()
    assert EXPECTED.is_query_aware.any() and not EXPECTED.is_query_aware.all()


@faults
@pytest.mark.parametrize("number", PICKS)
def test_comparisons_catch(fault, number):
    keep, lists = fault(number)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_blocks(RESULT._replace(keep=keep, lists=lists), EXPECTED)
    if not torch.equal(keep, RESULT.keep):
        with pytest.raises(AssertionError):
            assert_well_formed(RESULT._replace(lists=lists))
    mask = CASE.config.mask(CASE.query, CASE.key)
    assert_consistent(mask, (200, 200))
    faulty = block_mask_from_lists(lists, mask.mask_mod, BLOCK, (200, 200))
    with pytest.raises(AssertionError):
        assert_consistent(faulty, (200, 200))


def test_comparison_of_lists_with_the_map_catches_wrong_layouts():
    lists = RESULT.lists
    for wrong in (
        lists._replace(full_kv_num_blocks=lists.kv_num_blocks, full_kv_indices=lists.kv_indices),  # in both lists
        lists._replace(full_kv_indices=lists.full_kv_indices.flip(-1)),  # not ascending
        lists._replace(full_kv_indices=lists.full_kv_indices + 1),  # past the last block
        lists._replace(full_kv_indices=lists.full_kv_indices.long()),
        lists._replace(full_kv_indices=lists.full_kv_indices.mT.contiguous().mT),
    ):
        with pytest.raises(AssertionError):
            assert_well_formed(RESULT._replace(lists=wrong))


@pytest.mark.parametrize("name", ["density", "coverage", "num_vertical_blocks", "num_slash_blocks", "js_distance"])
def test_comparison_of_statistics_catches(name):
    assert_same_statistics(RESULT, EXPECTED)
    wrong = getattr(RESULT.stats, name).clone()
    wrong[0, 1] += 1 if "num" in name else 1e-3
    with pytest.raises(AssertionError):
        assert_same_statistics(RESULT._replace(stats=SimpleNamespace(**{**vars(RESULT.stats), name: wrong})), EXPECTED)


@pytest.mark.attention
@faults
def test_comparison_of_compiled_attention_catches(fault):
    value = torch.randn(1, 2, 200, 32, generator=torch.Generator().manual_seed(1))
    expected, _ = masked_attention(CASE.query, CASE.key, value, expanded(RESULT.keep, CASE))
    inputs = attention_inputs(CASE.query, CASE.key, value)

    def attend(lists):
        mask = block_mask_from_lists(lists, visible_mask_mod(inputs), BLOCK, (200, 200))
        with torch.no_grad():
            return run_flex_attention(inputs, mask, "cpu")[0]

    assert_same_attention(attend(RESULT.lists), expected)
    for number in PICKS:
        with pytest.raises(AssertionError, match="not close"):
            assert_same_attention(attend(fault(number)[1]), expected)


# the multiples, with values under which both decide something in `hybrid_case`; the others are those of the floor
SENSITIVE = hybrid.plain.Rule(14, 45)


def other_constant(name, factor):
    return hybrid, "RULE", SENSITIVE._replace(**{name: factor * getattr(SENSITIVE, name)})


def other_step(name, change):
    steps = hybrid.plain if hasattr(hybrid.plain, name) else plain
    right = getattr(steps, name)
    return steps, name, lambda *arguments: change(right, *arguments)


def with_argument(name, change):
    """A fault for `other_step`: the step runs with another value of one argument, wherever it stands."""

    def changed(right, *arguments):
        given = inspect.signature(right).bind(*arguments)
        given.arguments[name] = change(given.arguments[name])
        return right(*given.args)

    return changed


def mean_of_rows(right, problem, last, *rest):
    rows = last.lines.by_row
    return right(problem, last._replace(lines=last.lines._replace(by_row=rows.mean(2, keepdim=True).expand_as(rows))), *rest)


def evidence_by_seen(right, problem, row_stride):
    """Evidence times n/N, which is a threshold times N/n: each query block's even share is of the n blocks that it sees."""
    seen, evidence = problem.num_blocks_seen(), right(problem, row_stride)
    share = evidence.root_mean_square * (seen / seen.amax(-1, keepdim=True))[:, None, :, None]
    return evidence._replace(root_mean_square=share)


# by name: what is replaced, by which name of its module, and by what
RULE_FAULTS = {
    **{name: other_constant(name, 1.5) for name in SENSITIVE._fields},
    "mean instead of the most": other_step("key_blocks", mean_of_rows),
    "no floor": other_step("row_blocks", with_argument("min_coverage", lambda _: 0)),
    "a lower floor": other_step("row_blocks", with_argument("min_coverage", lambda share: share * 0.8)),
    "a floor of whole halvings": (hybrid.plain, "SLACK", -1e6),
    "no halvings": (hybrid.plain, "HALVINGS", 0),
    "no key blocks of the last rows": other_step("kept_blocks", with_argument("kept_lines", torch.zeros_like)),
    "no nearest": other_step("kept_blocks", with_argument("nearest", lambda _: 0)),
    "n for N": other_step("row_evidence", evidence_by_seen),
}

# where the last rows are dense
DENSE_FAULTS = {
    "no dense rows": other_step("kept_blocks", with_argument("dense_rows", lambda _: None)),
    "all rows dense": other_step("kept_blocks", with_argument("nearest", lambda _: 10**6)),
}


@functools.cache
def hybrid_case(last_rows_dense):
    """A case in which every clause of the rule decides something, and what the oracle decides."""
    query, key = structured_inputs(torch.Generator().manual_seed(5), 1, 12, 4, 640, 640, 32, sharpness=5.0)
    options = {"block_size": BLOCK, "min_budget": 3 * BLOCK, "min_coverage": 0.6, "row_stride": 4}
    case = Case(query, key, Config(0.7, method="hybrid", last_rows_dense=last_rows_dense, **options))
    expected = case.reference()
    assert not assert_same_blocks(case.select(), expected).any()
    return case, expected


@pytest.mark.parametrize(
    ("last_rows_dense", "fault"),
    [*((False, fault) for fault in RULE_FAULTS.values()), *((True, fault) for fault in DENSE_FAULTS.values())],
    ids=[*RULE_FAULTS, *DENSE_FAULTS],
)
def test_comparison_with_the_oracle_catches_another_rule(last_rows_dense, fault, monkeypatch):
    monkeypatch.setattr(hybrid, "RULE", SENSITIVE)
    case, expected = hybrid_case(last_rows_dense)
    monkeypatch.setattr(*fault)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_blocks(case.select(), expected)
