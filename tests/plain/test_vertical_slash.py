"""Key blocks and block diagonals: candidates and what they extend to."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmask.base.visibility import block_visibility, candidate_diagonals, token_validity
from flexmask.plain.vertical_slash import extended_lines
from tests.expected import by_block, seen_pairs


@st.composite
def prompts(draw):
    """Visible pairs, block visibility, position blocks of each query block, block size."""
    size = draw(st.sampled_from([2, 4, 16]))
    kv_len = draw(st.integers(1, 6 * size))
    q_len = draw(st.integers(1, kv_len))
    offset = draw(st.integers(0, kv_len - q_len))
    window = draw(st.none() | st.integers(1, kv_len))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    is_token = torch.rand(1, kv_len, generator=generator) < draw(st.sampled_from([0.3, 0.9, 1.0]))
    tokens = token_validity(q_len, kv_len, torch.tensor([offset]), is_token, torch.zeros(1, 1, kv_len, 16))
    pairs = seen_pairs(q_len, torch.tensor([offset]), is_token, window)
    stands_in = [{(offset + t) // size for t in range(r, min(r + size, q_len))} for r in range(0, q_len, size)]
    return pairs, block_visibility(tokens, size, window), stands_in, size


@settings(max_examples=80)
@given(prompts())
def test_candidates_are_diagonals_with_a_visible_block(prompt):
    pairs, seen, stands_in, size = prompt
    visible = by_block(pairs, size)[0]
    expected = {block - j for r, j in visible.nonzero().tolist() for block in stands_in[r] if block >= j}
    assert set(candidate_diagonals(seen)[0].nonzero().flatten().tolist()) == expected


@settings(max_examples=80)
@given(prompts(), st.integers(0, 2**31))
def test_lines_extend_to_every_visible_block_on_them(prompt, seed):
    pairs, seen, stands_in, size = prompt
    visible = by_block(pairs, size)[0]
    generator = torch.Generator().manual_seed(seed)
    vertical, slash = (torch.rand(1, 2, visible.shape[1], generator=generator) < 0.3 for _ in range(2))
    kept = extended_lines(vertical, slash, seen)
    for h in range(2):
        for r, j in visible.nonzero().tolist():
            on_slash = any(slash[0, h, block - j].item() for block in stands_in[r] if block >= j)
            assert kept[0, h, r, j].item() == (vertical[0, h, j].item() or on_slash)
