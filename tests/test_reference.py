"""The oracle itself, on cases small enough to work out by hand."""

import itertools
import math
from typing import Any

import pytest
import torch

from flexmask.reference import ReferenceResult, _fewest, reference_flexprefill

BLOCK = 16
NEVER = -1000.0  # a score that leaves exactly no attention beside a score of 0, in float64


def decide(scores, **options):
    """Run the oracle on attention scores given directly, (q_len, kv_len), for one head."""
    key = torch.eye(scores.shape[1], dtype=torch.float64)
    defaults: dict[str, Any] = {"gamma": 0.9, "tau": 0.0, "block_size": BLOCK, "min_budget": 0, "scale": 1.0}
    return reference_flexprefill(scores.double()[None, None], key[None, None], **{**defaults, **options})


def random_inputs(seed, q_len, kv_len, batch=1, num_heads=1, num_kv_heads=1, head_dim=16):
    """Random heads that are peaked enough to be sparse."""
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(batch, num_heads, q_len, head_dim, generator=generator)
    key = torch.randn(batch, num_kv_heads, kv_len, head_dim, generator=generator)
    return query, key


def planted_slash(length, offset, low=NEVER):
    """Scores under which every row attends the key `offset` before it (or, early on, none)."""
    scores = torch.full((length, length), low)
    for row in range(offset, length):
        scores[row, row - offset] = 0.0
    return scores


def blocks(result, batch=0, head=0):
    """The kept (r, j) of one head."""
    return set(map(tuple, result.keep[batch, head].nonzero().tolist()))


def causal_blocks(num_blocks):
    return {(r, j) for r in range(num_blocks) for j in range(r + 1)}


def lines(num_blocks, key_blocks, diagonals):
    """Causal blocks in the key blocks, on the diagonals, or kept always."""
    return {(r, j) for r, j in causal_blocks(num_blocks) if j in key_blocks or r - j in diagonals or j in (0, r)}


def row_with_block_shares(*shares):
    """Scores of one last row that spreads each share evenly over its key block."""
    return torch.tensor([math.log(share / BLOCK) for share in shares for _ in range(BLOCK)])[None]


def fewest_by_enumeration(values: list[float], gamma: float) -> int:
    """Size of the smallest subset holding gamma of the sum, by trying all subsets."""
    for size in range(len(values) + 1):
        for subset in itertools.combinations(values, size):
            if sum(subset) >= gamma * sum(values):
                return size
    raise AssertionError


# Vertical-slash heads


def test_sink_gives_key_block_zero_and_its_diagonal():
    scores = torch.full((64, 64), NEVER)
    scores[:, 0] = 0.0
    result = decide(scores)
    assert result.vertical[0, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
    # The last 16 rows see key 0 at offsets 48 to 63: on average 1 - 7.5/16 of them on diagonal 3,
    # the rest on diagonal 4, which does not exist.
    assert result.slash[0, 0].tolist() == [0.0, 0.0, 0.0, 1 - 7.5 / 16]
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (1, 1)
    assert blocks(result) == lines(4, {0}, {3})
    assert result.density.item() == 7 / 10
    assert result.coverage.item() == 1.0


@pytest.mark.parametrize("shift", [0, 1, 5, 15])
def test_slash_is_split_over_two_diagonals(shift):
    result = decide(planted_slash(64, BLOCK + shift), gamma=0.95)
    expected = [0.0, 1 - shift / BLOCK, shift / BLOCK, 0.0]
    assert result.slash[0, 0].tolist() == pytest.approx(expected, abs=1e-12)
    # Rows 48 to 63 see keys 32 - shift to 47 - shift.
    expected = [0.0, shift / BLOCK, 1 - shift / BLOCK, 0.0]
    assert result.vertical[0, 0].tolist() == pytest.approx(expected, abs=1e-12)
    chosen = {1} if shift == 0 else {1, 2}
    assert result.num_slash_blocks.item() == len(chosen)
    assert blocks(result) == lines(4, {2} if shift == 0 else {1, 2}, chosen)


def test_slash_share_is_the_fraction_of_row_phases():
    query, key = random_inputs(0, 72, 72)
    result = reference_flexprefill(query, key, 0.9, 0.0, block_size=BLOCK, min_budget=0)
    scores = (query[0, 0].double() @ key[0, 0].double().T) / 4
    p = torch.softmax(scores.masked_fill(~torch.ones(72, 72).tril().bool(), -math.inf), -1)[-16:]
    expected = [0.0] * 6
    for row in range(16):
        for column in range(72 - 16 + row + 1):
            offset = 56 + row - column
            for phase in range(BLOCK):
                # a row at this phase of its block, and the block of the key `offset` before it
                expected[-((phase - offset) // BLOCK)] += p[row, column].item() / BLOCK / 16
    assert result.slash[0, 0].tolist() == pytest.approx(expected[:5], abs=1e-12)
    assert expected[5] > 1e-6
    assert sum(expected) == pytest.approx(1.0)
    assert result.vertical[0, 0].tolist() == pytest.approx([part.sum().item() / 16 for part in p.split(BLOCK, dim=1)], abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [0.3, 0.6, 0.9])
def test_line_counts_are_minimal(seed, gamma):
    query, key = random_inputs(seed, 96, 96)
    result = reference_flexprefill(query, key, gamma, 0.0, block_size=BLOCK, min_budget=0)
    vertical, slash = result.vertical[0, 0].tolist(), result.slash[0, 0].tolist()
    counts = fewest_by_enumeration(vertical, gamma), fewest_by_enumeration(slash, gamma)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == counts
    key_blocks = result.vertical[0, 0].topk(counts[0]).indices.tolist()
    diagonals = result.slash[0, 0].topk(counts[1]).indices.tolist()
    assert blocks(result) == lines(6, key_blocks, diagonals)


def test_lines_hold_their_share_of_true_attention():
    query, key = random_inputs(1, 160, 160, num_heads=4)
    result = reference_flexprefill(query, key, 0.6, 0.0, block_size=BLOCK, min_budget=0)
    assert (result.coverage >= 0.6).all()
    assert (result.density < 1).all()
    assert (result.full <= result.keep).all()
    assert torch.equal(result.full, result.keep & torch.ones(10, 10).tril(-1).bool())
    assert ((result.vertical.sum(-1) - 1).abs() < 1e-12).all()


def test_equal_shares_take_the_lower_key_block_and_nearer_diagonal():
    # One row, at position 143, sees all 144 keys alike.
    result = decide(torch.zeros(1, 144), gamma=0.2)
    assert result.vertical[0, 0].tolist() == pytest.approx([1 / 9] * 9, abs=1e-12)
    # Offsets 0 to 15 give diagonal 0 only a share 1 - x/16 each: 8.5 of 144.
    assert result.slash[0, 0].tolist() == pytest.approx([8.5 / 144] + [1 / 9] * 8, abs=1e-12)
    # Two of each: key blocks 0 and 1, diagonals 1 and 2, which are blocks 7 and 6 here.
    assert blocks(result) == {(0, j) for j in (0, 1, 6, 7, 8)}
    assert result.vertical_margin.item() < 1e-9
    assert result.slash_margin.item() < 1e-9


def test_equal_shares_take_the_nearer_diagonal():
    # Offset 1.5 blocks: half on diagonal 1, half on 2. Keys 32 to 39 and 24 to 31 likewise.
    # One of each holds exactly the half that is asked for.
    result = decide(planted_slash(64, 24), gamma=0.5)
    assert result.slash[0, 0].tolist() == [0.0, 0.5, 0.5, 0.0]
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (1, 1)
    assert blocks(result) == lines(4, {1}, {1})
    assert result.slash_margin.item() == 0.0
    assert result.margin.item() == 0.0


def test_budgets_bound_both_counts():
    scores = torch.zeros(128, 128)
    few = planted_slash(128, 0)
    result = decide(few, gamma=0.5, min_budget=2 * BLOCK + 1)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (3, 3)
    # Key block 7 and diagonal 0 hold all; equal zeros are taken from the front, in any precision.
    assert blocks(result) == lines(8, {7, 0, 1}, {0, 1, 2})
    assert result.vertical_margin.item() == 1.0
    result = decide(scores, gamma=1.0, max_budget=2 * BLOCK + 1)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (3, 3)
    result = decide(few, gamma=0.5, min_budget=10_000)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (8, 8)
    result = decide(scores, max_budget=0)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (0, 0)
    assert blocks(result) == lines(8, set(), set())


def test_only_visible_lines_are_candidates():
    # The one row, at position 47, sees keys 40 to 47: block 2 on diagonal 0, nothing else.
    result = decide(torch.zeros(1, 48), window=8, min_budget=10 * BLOCK)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (1, 1)
    # Offset x of 0 to 7 leaves x/16 on diagonal 1, which holds no visible block.
    assert result.slash[0, 0].tolist() == pytest.approx([1 - 3.5 / 16, 0.0, 0.0], abs=1e-12)
    assert blocks(result) == {(0, 2)}
    assert result.density.item() == 1.0


# Pattern


@pytest.mark.parametrize("kv_len", [64, 20 * BLOCK + 1])
def test_uniform_attention_has_no_distance(kv_len):
    result = decide(torch.zeros(1, kv_len), tau=0.01)
    assert result.js_distance.item() < 1e-7
    assert result.is_query_aware.item()


def test_one_token_tail_weighs_as_one_token():
    # The last block is one key; weighing it as a whole block would give a distance of 0.14.
    length = 20 * BLOCK + 1
    result = decide(torch.zeros(length, length))
    assert 0.04 < result.js_distance.item() < 0.05


def test_distance_of_two_known_distributions():
    # One row, scores 40 and -40 in block 0: the mean hides them, so the estimate is (1/2, 1/2).
    scores = torch.zeros(1, 32)
    scores[0, 0], scores[0, 1] = 40.0, -40.0
    divergence = (math.log(1 / 0.75) + 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2)) / 2
    result = decide(scores, tau=0.5)
    assert result.js_distance.item() == pytest.approx(math.sqrt(divergence), rel=1e-9)
    assert result.is_query_aware.item()
    expected = (0.5 - math.sqrt(divergence)) / 0.5
    assert result.pattern_margin.item() == pytest.approx(expected)
    assert not decide(scores, tau=0.4).is_query_aware.item()
    assert decide(scores, tau=0.0).pattern_margin.item() == math.inf


def test_distance_is_at_most_root_log_two():
    # All attention on block 0, whose mean score is far below block 1's.
    scores = torch.full((1, 32), NEVER)
    scores[0, 0], scores[0, BLOCK:] = 0.0, -50.0
    distance = decide(scores, tau=1.0).js_distance.item()
    assert distance == pytest.approx(math.sqrt(math.log(2)))


@pytest.mark.parametrize("name", ["pattern_queries", "index_queries"])
def test_middle_rows_by_ordinal(name):
    # Every row sees itself only; of 41 rows the middle 16 are 12 to 27, the last 25 to 40.
    result = decide(planted_slash(41, 0), **{name: "middle"})
    expected = [4 / 16, 12 / 16, 0.0] if name == "index_queries" else [0.0, 7 / 16, 9 / 16]
    assert result.vertical[0, 0].tolist() == expected


def test_pattern_rows_decide_the_distance_only():
    scores = torch.zeros(96, 96)
    scores[80:, 3], scores[80:, 4] = 12.0, -12.0
    last, middle = decide(scores, tau=0.3), decide(scores, tau=0.3, pattern_queries="middle")
    assert not last.is_query_aware.item()
    assert middle.is_query_aware.item()
    assert torch.equal(last.vertical, middle.vertical)


def test_representative_rows_are_valid_rows_adjacent_or_not():
    attention_mask = torch.ones(1, 64, dtype=torch.int64)
    attention_mask[0, 40:56] = 0
    result = decide(planted_slash(64, 0), attention_mask=attention_mask)
    assert result.vertical[0, 0].tolist() == [0.0, 0.0, 0.5, 0.5]


# Query-aware heads


def block_scores(*rows):
    """Scores constant on each block, so that the pooled map is the softmax of the levels."""
    levels = torch.tensor(rows, dtype=torch.float64).log()
    return levels.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


# Pooled map: 1 / .25 .75 / .25 .5 .25; only block (2, 1) is not kept anyway.
THREE_ROWS = block_scores([1, 1, 1], [1, 3, 1], [1, 2, 1])


def test_pooled_map_is_block_softmax():
    result = decide(THREE_ROWS, tau=1.0)
    expected = torch.tensor([[1, 0, 0], [0.25, 0.75, 0], [0.25, 0.5, 0.25]])
    assert torch.allclose(result.pooled[0, 0], expected.double(), rtol=0, atol=1e-12)
    assert result.is_query_aware.item()


def test_flatten_shares_one_budget_and_per_query_does_not():
    forced = lines(3, {}, {})
    # Of 3: 1 + .75 reach 1.35; in row 2 the .5 reaches .45 by itself.
    assert blocks(decide(THREE_ROWS, gamma=0.45, tau=1.0)) == forced
    per_query = decide(THREE_ROWS, gamma=0.45, tau=1.0, query_aware="per_query")
    assert blocks(per_query) == forced | {(2, 1)}
    # The block that crosses is kept: 1.75 < 1.8.
    assert blocks(decide(THREE_ROWS, gamma=0.6, tau=1.0)) == forced | {(2, 1)}


def test_equal_pooled_values_take_the_lower_flat_index():
    # Row r holds 1 / (r + 1) in each block: 1, 2 halves, 3 thirds, then 2 of row 3's quarters.
    result = decide(torch.zeros(80, 80), gamma=0.68, tau=1.0)
    assert blocks(result) == lines(5, {}, {}) | {(2, 1), (3, 1)}
    assert result.query_aware_margin.item() < 1e-9


@pytest.mark.parametrize("query_aware", ["flatten", "per_query"])
@pytest.mark.parametrize("gamma", [0.5, 0.8])
def test_pooled_selection_is_minimal(query_aware, gamma):
    query, key = random_inputs(3, 64, 64)
    query = query * 4
    result = reference_flexprefill(query, key, gamma, 1.0, block_size=BLOCK, min_budget=0, query_aware=query_aware)
    pooled = result.pooled[0, 0]
    groups = list(pooled) if query_aware == "per_query" else [pooled.flatten()]
    chosen = set()
    for number, group in enumerate(groups):
        values = group[group > 0].tolist()
        kept = group.topk(fewest_by_enumeration(values, gamma)).indices + number * len(pooled)
        chosen |= {(index // 4, index % 4) for index in kept.tolist()}
    assert len(chosen) < 10
    assert blocks(result) == chosen | lines(4, {}, {})


def test_row_budget_keeps_the_heaviest():
    scores = block_scores(*[[1, 2, 3, 4, 5]] * 5)
    result = decide(scores, gamma=1.0, tau=1.0, max_budget=2 * BLOCK)
    heaviest = {(r, j) for r, j in causal_blocks(5) if j >= r - 1}
    assert blocks(result) == heaviest | lines(5, {}, {})
    assert result.num_vertical_blocks.item() == 0


def test_query_aware_head_gets_the_floor():
    # The last rows look 2 blocks back; the pooled map is flat enough for the pattern to differ.
    scores = torch.zeros(96, 96)
    scores[80:, 40] = 2.0
    result = decide(scores, gamma=0.05, tau=1.0, min_budget=BLOCK)
    assert result.is_query_aware.item()
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (1, 1)
    assert result.vertical[0, 0].argmax().item() == 2
    diagonal = result.slash[0, 0].argmax().item()
    assert blocks(result) == lines(6, {2}, {diagonal})


# Always kept, never kept


def test_always_keeps_first_visible_and_diagonal_blocks():
    # All attention three blocks back, gamma tiny: everything else is there by right only.
    forced = lines(6, {}, {})
    assert blocks(decide(planted_slash(96, 48), gamma=0.01)) == forced | lines(6, {2}, {3})
    window = decide(planted_slash(96, 24), gamma=0.01, window=40)
    # Row block r sees keys from 16r - 39: block r - 3 is the first from r = 3 on.
    for r in range(6):
        assert {(r, max(0, r - 3)), (r, r)} <= blocks(window)
    attention_mask = torch.ones(1, 96, dtype=torch.bool)
    attention_mask[0, :20] = False
    padded = decide(planted_slash(96, 24), gamma=0.01, attention_mask=attention_mask)
    assert all({(r, 1), (r, r)} <= blocks(padded) for r in range(1, 6))
    assert not any(j == 0 or r == 0 for r, j in blocks(padded))


@pytest.mark.parametrize("seed", range(6))
def test_visible_and_full_blocks_pair_by_pair(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    kv_len = draw(20, 70)
    q_len = draw(1, kv_len)
    offset, window = draw(0, kv_len - q_len), draw(5, 60) if seed % 2 else None
    attention_mask = torch.rand(1, kv_len, generator=generator) < [0.7, 0.98, 1.0][seed % 3]
    result = decide(
        torch.randn(q_len, kv_len, generator=generator),
        gamma=1.0,
        q_offset=offset,
        window=window,
        attention_mask=attention_mask.int(),
    )
    for r in range(math.ceil(q_len / BLOCK)):
        for j in range(math.ceil(kv_len / BLOCK)):
            pairs = []
            for row in range(r * BLOCK, min(q_len, (r + 1) * BLOCK)):
                for column in range(j * BLOCK, min(kv_len, (j + 1) * BLOCK)):
                    position = offset + row
                    pairs.append(
                        bool(attention_mask[0, position] and attention_mask[0, column])
                        and column <= position
                        and (window is None or position - column < window)
                    )
            assert result.keep[0, 0, r, j].item() == any(pairs)
            assert result.full[0, 0, r, j].item() == all(pairs)


def test_full_blocks_with_window():
    result = decide(torch.zeros(64, 64), gamma=1.0, window=32)
    assert blocks(result) == {(r, j) for r, j in causal_blocks(4) if r - j <= 2}
    full = result.full[0, 0].nonzero().tolist()
    assert full == [[1, 0], [2, 1], [3, 2]]


def test_full_blocks_with_a_hole():
    attention_mask = torch.ones(1, 64, dtype=torch.bool)
    attention_mask[0, 20] = False
    result = decide(torch.zeros(64, 64), gamma=1.0, attention_mask=attention_mask)
    # Token 20 spoils row block 1 and key block 1.
    assert blocks(result) == causal_blocks(4)
    assert result.full[0, 0].nonzero().tolist() == [[2, 0], [3, 0], [3, 2]]


@pytest.mark.parametrize("selected_by", [{"tau": 0.0}, {"tau": 1.0}])
def test_larger_gamma_keeps_more(selected_by):
    query, key = random_inputs(4, 150, 150, num_heads=2)
    options: dict[str, Any] = {"block_size": BLOCK, "min_budget": BLOCK, **selected_by}
    kept = [reference_flexprefill(query, key, g, **options) for g in (0.2, 0.5, 0.8, 0.95, 1.0)]
    for fewer, more in itertools.pairwise(kept):
        assert (fewer.keep <= more.keep).all()
        assert (fewer.density <= more.density).all()
    assert (kept[0].density < kept[-2].density).all()
    assert torch.equal(kept[-1].keep[0, 0], torch.ones(10, 10).tril().bool())
    assert (kept[-1].density == 1).all()
    assert (kept[-1].vertical_margin == math.inf).all()
    assert (kept[-1].slash_margin == math.inf).all()
    assert (kept[-1].query_aware_margin == math.inf).all()


def test_default_floor_keeps_a_short_prompt_whole():
    query, key = random_inputs(5, 1000, 1000)
    assert reference_flexprefill(query, key).density.item() == 1.0


# Padding and chunks


def test_row_of_padding_keeps_nothing():
    query, key = random_inputs(6, 64, 64, batch=2)
    attention_mask = torch.tensor([[0] * 64, [1] * 64])
    options: dict[str, Any] = {"gamma": 0.5, "tau": 1.0, "block_size": BLOCK, "min_budget": 32}
    result = reference_flexprefill(query, key, attention_mask=attention_mask, **options)
    assert not result.keep[0].any()
    assert not result.full[0].any()
    assert not result.is_query_aware[0].any()
    for name in ("js_distance", "density", "coverage", "num_vertical_blocks", "vertical"):
        assert (getattr(result, name)[0] == 0).all()
    assert (result.margin[0] == math.inf).all()
    alone = reference_flexprefill(query[1:], key[1:], **options)
    assert torch.equal(result.keep[1:], alone.keep)
    assert torch.equal(result.margin[1:], alone.margin)


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_left_padding_by_whole_blocks_shifts_the_mask(tau):
    query, key = random_inputs(7, 96, 96, num_heads=2)
    options: dict[str, Any] = {"gamma": 0.4, "tau": tau, "block_size": BLOCK, "min_budget": 0}
    plain = reference_flexprefill(query, key, **options)
    junk, junk_key = random_inputs(8, 32, 32, num_heads=2)
    attention_mask = torch.tensor([[0] * 32 + [1] * 96])
    padded = reference_flexprefill(
        torch.cat([junk, query], 2),
        torch.cat([junk_key, key], 2),
        attention_mask=attention_mask,
        **options,
    )
    assert torch.equal(padded.keep[..., 2:, 2:], plain.keep)
    assert padded.keep.sum() == plain.keep.sum()
    assert torch.allclose(padded.js_distance, plain.js_distance)
    assert torch.allclose(padded.coverage, plain.coverage)
    assert (plain.density < 1).all()


def test_last_chunk_on_a_boundary_equals_the_whole():
    query, key = random_inputs(9, 150, 150, num_heads=2)
    options: dict[str, Any] = {"gamma": 0.6, "tau": 0.0, "block_size": BLOCK, "min_budget": 0}
    whole = reference_flexprefill(query, key, **options)
    chunk = reference_flexprefill(query[:, :, 96:], key, **options)
    assert torch.equal(chunk.keep, whole.keep[:, :, 6:])
    assert torch.equal(chunk.full, whole.full[:, :, 6:])


def test_chunk_inside_a_block_lies_on_two_diagonals():
    # Rows at positions 40 to 71: query block 0 stands in blocks 2 and 3, block 1 in 3 and 4.
    scores = torch.full((32, 72), NEVER)
    for row in range(32):
        scores[row, 40 + row - 32] = 0.0
    result = decide(scores, gamma=0.5)
    assert result.slash[0, 0].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    # The last 16 rows see keys 24 to 39: half in block 1, half in block 2, the lower is taken.
    forced = {(0, 0), (0, 2), (0, 3), (1, 0), (1, 3), (1, 4)}
    assert blocks(result) == forced | {(0, 1), (1, 1)} | {(0, 0), (0, 1), (1, 1), (1, 2)}


@pytest.mark.parametrize("q_offset", [24, torch.tensor(24), torch.tensor([24, 16])], ids=["int", "0-d", "batch"])
def test_unfilled_keys_do_not_exist(q_offset):
    query, key = random_inputs(10, 40, 100, batch=2)
    options: dict[str, Any] = {"gamma": 0.7, "tau": 0.2, "block_size": BLOCK, "min_budget": BLOCK}
    result = reference_flexprefill(query, key, q_offset=q_offset, **options)
    for b, offset in enumerate(torch.as_tensor(q_offset).expand(2).tolist()):
        filled = offset + 40
        shorter = reference_flexprefill(query[b : b + 1], key[b : b + 1, :, :filled], **options)
        num_kv_blocks = shorter.keep.shape[-1]
        assert torch.equal(result.keep[b, :, :, :num_kv_blocks], shorter.keep[0])
        assert not result.keep[b, :, :, num_kv_blocks:].any()
        assert torch.allclose(result.js_distance[b], shorter.js_distance[0], rtol=1e-12)


def test_offset_out_of_range():
    query, key = random_inputs(0, 40, 64)
    with pytest.raises(ValueError, match="q_offset"):
        reference_flexprefill(query, key, q_offset=25)
    options: dict[str, Any] = {"gamma": 0.5, "block_size": BLOCK, "min_budget": 0}
    clamped = reference_flexprefill(query, key, q_offset=torch.tensor(99), **options)
    assert torch.equal(clamped.keep, reference_flexprefill(query, key, **options).keep)


# Scores and heads


def test_scale_and_softcap_shape_the_scores():
    scores = torch.zeros(1, 32)
    scores[0, 0] = 2.0
    result = decide(scores, scale=3.0, softcap=5.0)
    weight = math.exp(5 * math.tanh(6 / 5))
    assert result.vertical[0, 0, 0].item() == pytest.approx((weight + 15) / (weight + 31))
    # The pooled score is capped after the mean: 3 * 2 / 16.
    weight = math.exp(5 * math.tanh(6 / 16 / 5))
    assert result.pooled[0, 0, 0, 0].item() == pytest.approx(weight / (weight + 1))


def test_heads_share_keys_in_groups():
    query, key = random_inputs(11, 64, 64, num_heads=4, num_kv_heads=2)
    options: dict[str, Any] = {"gamma": 0.5, "tau": 0.3, "block_size": BLOCK, "min_budget": 0}
    grouped = reference_flexprefill(query, key, **options)
    expanded = reference_flexprefill(query, key.repeat_interleave(2, 1), **options)
    for name in ReferenceResult.__dataclass_fields__:
        assert torch.equal(getattr(grouped, name), getattr(expanded, name)), name
    assert not torch.equal(grouped.vertical[0, 1], grouped.vertical[0, 2])


# Margins


def test_gap_of_values_that_are_rounded_coarsely():
    values = [0.9, 3e-9, 2e-9]
    assert _fewest(values, [0, 1, 2], 0.5, at_least=2)[1] == pytest.approx(1 / 3)
    assert _fewest(values, [0, 1, 2], 0.5, at_least=2, least=0.01)[1] == pytest.approx(1e-7)


def test_margin_of_running_sum_and_gap():
    def margin(gamma, **options):
        result = decide(row_with_block_shares(0.5, 0.3, 0.2), gamma=gamma, **options)
        return result.vertical_margin.item()

    # .5 falls short of .6 by a sixth; .8 and the gap from .3 to .2 are a third away.
    assert margin(0.6) == pytest.approx(1 / 6)
    # .8 is just above .79.
    assert margin(0.79) == pytest.approx(0.01 / 0.79)
    # A floor of 2 takes .3 before .2, whatever the running sum before it; .8 is far above .4.
    assert margin(0.4, min_budget=2 * BLOCK) == pytest.approx(1 / 3)
    # A limit of 1: .5 is far below .9, and takes precedence over .3 by two fifths.
    assert margin(0.9, max_budget=BLOCK) == pytest.approx(0.4)
    assert margin(1.0) == math.inf


def test_margin_is_zero_where_float32_underflows():
    # Shares of e-87 and e-92 after the first block: float32 may not tell them apart.
    scores = row_with_block_shares(1.0, math.exp(-87), math.exp(-92))
    assert decide(scores, min_budget=2 * BLOCK).vertical_margin.item() == 0.0
    scores = row_with_block_shares(1.0, math.exp(-60), math.exp(-61))
    result = decide(scores, min_budget=2 * BLOCK)
    assert result.vertical_margin.item() == pytest.approx(0.1 / 0.9)


def test_wide_margins_survive_float32():
    decided = 0
    for seed in range(12):
        query, key = random_inputs(seed, 112, 112, num_heads=2)
        options: dict[str, Any] = {"gamma": 0.7, "tau": 0.25, "block_size": BLOCK, "min_budget": BLOCK}
        exact = reference_flexprefill(query, key, **options)
        generator = torch.Generator().manual_seed(seed)
        noise = 1 + 1e-7 * torch.randn(query.shape, generator=generator, dtype=torch.float64)
        noisy = reference_flexprefill(query.double() * noise, key, **options)
        wide = exact.margin > 1e-5
        decided += int(wide.sum())
        assert torch.equal(exact.keep[wide], noisy.keep[wide])
    assert decided >= 20


def test_margin_is_the_smallest_that_matters():
    query, key = random_inputs(12, 112, 112, num_heads=8)
    options: dict[str, Any] = {"gamma": 0.7, "block_size": BLOCK, "min_budget": BLOCK}
    for tau, selection in itertools.product((0.1, 1.0), ("coverage", "reference")):
        result = reference_flexprefill(query, key, tau=tau, selection=selection, **options)
        assert result.is_query_aware.all() == (tau == 1.0)
        lines_margin = result.vertical_margin.minimum(result.slash_margin)
        expected = result.pattern_margin.minimum(lines_margin)
        both = expected.minimum(result.query_aware_margin)
        assert torch.equal(result.margin, torch.where(result.is_query_aware, both, expected))


# selection="reference": what the published code does


def test_published_count_includes_equal_sums():
    # The last rows spread evenly over 256 keys, so n tokens hold exactly n / 256: all 16 keys of
    # block 1 and 8 in each of the others but the last.
    scores = torch.full((512, 512), NEVER)
    scores[:, :496].unflatten(1, (31, BLOCK))[:, :, :8] = 0.0
    scores[:, BLOCK : 2 * BLOCK] = 0.0
    options: dict[str, Any] = {"selection": "reference", "tau": 1.0}
    # 127 tokens hold 127/256, and one more makes 128: two blocks.
    for tokens, count in ((126.75, 1), (127, 2), (127.25, 2)):
        result = decide(scores, gamma=tokens / 256, **options)
        assert result.num_vertical_blocks.item() == count
        assert result.vertical_margin.item() == pytest.approx(abs(tokens - 127) / tokens)
    # No attention on the last block: an underflow, so the head is not query-aware at tau = 1.
    assert math.isnan(result.js_distance.item())
    assert not result.is_query_aware.item()
    assert result.pattern_margin.item() == math.inf


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_published_keeps_all_at_gamma_one(tau):
    query, key = random_inputs(13, 512, 512, num_heads=8)
    # Some of the peaked heads reach a running sum above 1, by rounding, long before the end.
    query = query * (20 if tau == 0 else 1)
    result = reference_flexprefill(query, key, 1.0, tau, min_budget=0, selection="reference")
    assert (result.density == 1).all()
    assert (result.is_query_aware == (tau == 1)).all()
    assert (result.margin == (math.inf if tau == 0 else result.pattern_margin)).all()


def test_published_underflow_is_that_of_float32():
    scores = torch.zeros(32, 32)
    scores[16:, :16] = -90.0
    options: dict[str, Any] = {"selection": "reference", "tau": 1.0}
    assert decide(scores, **options).is_query_aware.item()
    scores[16:, :16] = -150.0
    assert not decide(scores, **options).is_query_aware.item()
    scores[16:, :16] = -104.0
    assert decide(scores, **options).pattern_margin.item() == 0.0


def test_published_slash_block_stands_for_one_diagonal():
    # All attention at offset 21: offset block 1, though it crosses diagonals 1 and 2.
    scores = planted_slash(96, 21)
    options: dict[str, Any] = {"selection": "reference", "gamma": 0.9}
    result = decide(scores, min_budget=2 * BLOCK, **options)
    assert result.slash[0, 0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    # Block 0 takes one of the two places; rows 80 to 95 see keys 59 to 74, mostly block 4.
    kept = {(r, j) for r, j in causal_blocks(6) if j in (0, 4) or r - j in (0, 1)}
    assert blocks(result) == kept
    # One place, and it goes to block 0.
    result = decide(scores, **options)
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (1, 1)
    assert blocks(result) == {(r, j) for r, j in causal_blocks(6) if j == 0 or j == r}


def test_published_query_aware_leaves_the_crossing_block_out():
    # Of 3: 1 + .75 stay within 1.8, the .5 crosses. Key block 0 and the diagonal are there without a floor too.
    options: dict[str, Any] = {"selection": "reference", "tau": 1.0}
    result = decide(THREE_ROWS, gamma=0.6, **options)
    assert blocks(result) == lines(3, {0}, {0})
    assert (result.num_vertical_blocks.item(), result.num_slash_blocks.item()) == (0, 0)
    expected = min(0.05 / 1.8, 0.45 / 1.8, 0.25 / 0.75)
    assert result.query_aware_margin.item() == pytest.approx(expected)
    result = decide(THREE_ROWS, gamma=0.6, min_budget=BLOCK, **options)
    assert blocks(result) == lines(3, {0}, {0})


def test_published_counts_are_clamped():
    scores = torch.zeros(512, 512)
    options: dict[str, Any] = {"selection": "reference", "gamma": 0.9}
    # 512 keys, nearly even: between 384 and 511 tokens hold .9, so 4 blocks of whatever size.
    assert decide(scores, **options).num_vertical_blocks.item() == 4
    capped = decide(scores, max_budget=2 * BLOCK + 1, **options)
    assert capped.num_vertical_blocks.item() == 3
    raised = decide(scores, min_budget=6 * BLOCK, **options)
    assert (raised.num_vertical_blocks.item(), raised.num_slash_blocks.item()) == (6, 6)
    whole = decide(scores, min_budget=10_000, **options)
    assert whole.num_slash_blocks.item() == 32
    assert whole.density.item() == 1.0
    assert whole.vertical_margin.item() == math.inf


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 10.0},
        {"window": 64},
        {"attention_mask": torch.ones(1, 64)},
        {"pattern_queries": "middle"},
        {"index_queries": "middle"},
        {"query_aware": "per_query"},
        {"q_offset": torch.tensor(0)},
        {"block_size": 48},
    ],
    ids=lambda options: next(iter(options)),
)
def test_published_refuses_what_it_cannot_do(options):
    query, key = random_inputs(0, 64, 64)
    with pytest.raises(ValueError, match="reference"):
        reference_flexprefill(query, key, selection="reference", **{"block_size": BLOCK, **options})


def test_published_refuses_chunks():
    query, key = random_inputs(0, 32, 64)
    with pytest.raises(ValueError, match="q_len == kv_len"):
        reference_flexprefill(query, key, selection="reference", block_size=BLOCK)


@pytest.mark.parametrize("name", ["selection", "query_aware", "pattern_queries", "index_queries"])
def test_unknown_words(name):
    query, key = random_inputs(0, 32, 32)
    options: dict[str, Any] = {name: "nothing"}
    with pytest.raises(ValueError, match=name):
        reference_flexprefill(query, key, **options)
