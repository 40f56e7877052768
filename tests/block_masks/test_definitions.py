"""Every method equals its definition: whole, in chunks, in slices, next to heads that are not finite."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexmask import METHODS
from flexmask.selection import prepare, run
from tests.attention_calls import call, padding
from tests.block_masks.definition_call import Call
from tests.block_masks.definitions import DEFINITIONS, MASKS, TESTED, mask_of
from tests.cases import Case
from tests.oracle.steps import AttentionHead
from tests.oracle.visibility import query_offsets, visibility

SIZE = 16
MARGIN = 1e-5
_SLOT = torch.arange(110)
HOLES = (_SLOT % 7 != 3) & (_SLOT >= torch.tensor([[5], [0]])) & ((_SLOT < 40) | (_SLOT > 60))
CASES: dict[str, dict[str, Any]] = {
    "whole": {"q_len": 128},
    "ragged": {"q_len": 103, "scores": {"softcap": 3.0}},
    "one row": {"q_len": 1, "kv_len": 63},
    "chunk": {"q_len": 64, "kv_len": 150, "scores": {"scale": 0.4}},
    "offsets, window and left padding": {
        "q_len": 60, "kv_len": 130, "q_offset": torch.tensor([37, 70]), "scores": {"window": 75},
        "attention_mask": padding(130, ("left", 20), ("left", 53)),
    },
    "right padding": {"q_len": 129, "scores": {"softcap": 5.0}, "attention_mask": padding(129, ("right", 3), ("right", 41))},
    "holes and window": {"q_len": 110, "scores": {"window": 60}, "attention_mask": HOLES},
}  # fmt: skip
SCORES: dict[str, Any] = {"scale": 32**-0.5, "softcap": None, "window": None}  # unless a case has others
CHOICES = [(name, options) for name in DEFINITIONS for options in (TESTED[name].sparse, *TESTED[name].others)]


def case_of(name: str) -> Case:
    return call(**CASES[name], batch=2, heads=(2, 1), block_size=SIZE, seed=3, sharpness=2.0)


def map_of(name: str, case: Case, **options: Any) -> Tensor:
    return mask_of(name, case, **options).to_dense().bool()


def chosen_of(name: str, case: Case) -> list[Tensor]:
    both: Any = mask_of(name, case, **TESTED[name].sparse, return_stats=True)
    mask, stats = both
    return [mask.to_dense(), *(x for x in vars(stats).values() if isinstance(x, Tensor))]


def expected_of(name: str, case: Case, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Visible blocks by definition, and the rows that have a margin."""
    q_len, kv_len = case.query.shape[2], case.key.shape[2]
    tokens = torch.ones(2, kv_len) if case.attention_mask is None else case.attention_mask
    blocks, rows = -(-kv_len // SIZE), -(-q_len // SIZE)
    scale, softcap, window = (case.scores.get(name, other) for name, other in SCORES.items())
    keep, clear = torch.zeros(2, 2, rows, blocks, dtype=torch.bool), torch.zeros(2, 2, rows, dtype=torch.bool)
    for b, offset in enumerate(query_offsets(case.q_offset, 2, kv_len - q_len)):
        seen = visibility(q_len, offset, tokens[b].bool(), window, SIZE)
        written = Call(
            [AttentionHead(case.query[b, h].double(), case.key[b, 0].double(), scale, softcap) for h in range(2)], seen, window
        )
        for h, i in itertools.product(range(2), range(rows)):
            kept, margin = DEFINITIONS[name](written, h, i, **options)
            visible = seen.blocks_of(i)
            keep[b, h, i, [j for j in visible if j in kept or j in seen.position_blocks[i]]] = True
            clear[b, h, i] = margin > MARGIN or not visible
    return keep, clear


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "options"), CHOICES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CHOICES)])
def test_keeps_the_blocks_of_its_definition(name, options, case):
    got = map_of(name, case_of(case), **options).expand(2, 2, -1, -1)
    expected, clear = expected_of(name, case_of(case), options)
    assert clear.float().mean() > 0.9, "too many rows are close calls for the comparison to say much"
    wrong = ((got != expected) & clear[..., None]).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} blocks differ, the first at {wrong[0].tolist()}"


@pytest.mark.parametrize("case", ["whole", "offsets, window and left padding", "right padding"])
@pytest.mark.parametrize("name", [name for name in DEFINITIONS if METHODS[name]().floats_per_row(4096)])
def test_slices_of_rows_change_nothing(name, case, monkeypatch):
    expected = map_of(name, case_of(case))
    slices, run_plain = [], run.run_plain
    monkeypatch.setattr(run, "run_plain", lambda *arguments: slices.append(1) or run_plain(*arguments))
    monkeypatch.setattr(prepare, "MAX_FLOATS_PER_SLICE", 1)
    assert torch.equal(map_of(name, case_of(case)), expected)
    assert len(slices) > 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["query", "key"])
@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("infllm", "causal")])
def test_a_head_that_is_not_finite_spoils_no_other_nor_its_statistics(name, part, bad):
    case = call(q_len=112, batch=2, seed=5, sharpness=2.0)
    expected = chosen_of(name, case)
    getattr(case, part)[0, 1, 50::10] = bad  # also of the last rows
    spoiled = torch.zeros(2, 4, dtype=torch.bool)
    spoiled[0, [1] if part == "query" else [2, 3]] = True
    for found, before in zip(chosen_of(name, case), expected, strict=True):
        others = ~spoiled if found.shape[1] == 4 else torch.tensor([[True], [True]])  # one map for all heads
        torch.testing.assert_close(found[others], before[others], rtol=0, atol=0, equal_nan=True)


# of every row or of this one's window; keys out of every row's window still weigh in their block's mean
@pytest.mark.parametrize("of", ["right padding", "offsets, window and left padding", "holes and window"])
@pytest.mark.parametrize("name", [name for name in MASKS if name != "published"])  # which takes no padding
def test_what_padding_and_slots_behind_a_chunk_hold_does_not_matter(name, of):
    case = case_of(of)
    q_len, kv_len = case.query.shape[2], case.key.shape[2]
    expected = map_of(name, case)
    position = torch.tensor(query_offsets(case.q_offset, 2, kv_len - q_len))[:, None] + torch.arange(q_len)
    tokens = case.attention_mask.bool()
    keys = tokens & (torch.arange(kv_len) <= position[:, -1:])
    for rows, tensor, value in ((tokens.gather(1, position), case.query, torch.nan), (keys, case.key, torch.inf)):
        tensor.masked_fill_(~rows[:, None, :, None], value)
    assert torch.equal(map_of(name, case), expected)


@pytest.mark.parametrize(("left", "right"), [(0, 37), (4 * SIZE, 0), (2 * SIZE, 7 * SIZE)])
@pytest.mark.parametrize(
    ("name", "options"), [(name, o) for name in MASKS if name != "published" for o in (TESTED[name].sparse, *TESTED[name].others)]
)
def test_padding_of_whole_blocks_and_a_longer_cache_change_no_choice(name, options, left, right):
    alone = call(q_len=9 * SIZE, heads=(2, 1), block_size=SIZE, seed=3, sharpness=2.0)
    expected = map_of(name, alone, **options)
    # left a multiple of infllm's groups
    query, key = (torch.nn.functional.pad(x, (0, 0, left, right)) for x in (alone.query, alone.key))
    tokens = padding(query.shape[2], ("left", left)) * padding(query.shape[2], ("right", right))
    padded = replace(alone, query=query, key=key, attention_mask=tokens)
    cached = replace(
        padded, query=query[:, :, : left + 9 * SIZE], attention_mask=padding(query.shape[2], ("left", left)), q_offset=0
    )
    for case in (padded, cached):
        got = map_of(name, case, **options)
        blocks = slice(left // SIZE, left // SIZE + 9)
        assert torch.equal(got[:, :, blocks, blocks], expected) and got.sum() == expected.sum()
