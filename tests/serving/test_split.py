"""The split of a step: every row in exactly one place."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmask.dense_policy import DensePolicy
from flexmask.integrations.serving.chunk import SparseRequest
from flexmask.integrations.serving.options import MIN_ROWS, RequestOptions, read_options
from flexmask.integrations.serving.split import StepRequests, StockSpan, split_step
from flexmask.integrations.serving.startup import roles_line
from tests.serving.layers import sparse_role


def test_sparse_requests_have_their_prompt_s_length():
    lengths = np.array([900, 300, 5], dtype=np.int32)
    requests = StepRequests([0, 300, 600, 900], [600, 300, 300], prompt_lens=lengths)
    split = split_step(requests, DensePolicy(256, 64))
    assert [each.prompt_len for each in split.sparse] == [900, 300, 5] and type(split.sparse[0].prompt_len) is int
    # requests that pad the batch have no prompt
    padded = split_step(StepRequests([0, 300, 600], [600, 300], prompt_lens=[7]), DensePolicy(256, 64))
    assert [each.prompt_len for each in padded.sparse] == [7, None]


def test_a_request_s_own_gamma_and_dense_attention_decide_the_split():
    chosen = [None, RequestOptions(gamma=0.5), RequestOptions(dense=True)]
    # the last two decode
    requests = StepRequests([*range(0, 1201, 300), 1201, 1202], [300] * 4 + [900, 31], options=chosen)
    split = split_step(requests, DensePolicy(256, 64))
    assert [(each.batch_index, each.gamma) for each in split.sparse] == [(0, None), (1, 0.5), (3, None)]
    assert split.stock == (StockSpan(2, 3, 600, 900), StockSpan(4, 6, 1200, 1202))
    assert (split.sparse_tokens, split.dense_tokens) == (900, 300)


@pytest.mark.parametrize("seq_lens", [None, [0, 0], [99, 0]])
def test_rows_whose_lengths_the_host_does_not_know_run_stock(seq_lens):
    """Also at dense_below=0, where a sparse request would have a negative number of cached tokens."""
    split = split_step(StepRequests([0, 100, 164], seq_lens), DensePolicy(0, 16))
    assert (split.sparse, split.stock, split.dense_tokens) == ((), (StockSpan(0, 2, 0, 164),), 164)
    # first chunks
    known = split_step(StepRequests([0, 100, 164], [100, 64]), DensePolicy(0, 16))
    assert [each.cached_len for each in known.sparse] == [0, 0]


@pytest.mark.parametrize(("given", "min_rows"), [({}, MIN_ROWS), ({"dense_below": 0}, 128), ({"min_rows": 1000}, 1000)])
def test_the_least_rows_of_a_chunk_are_the_measured_ones_or_the_option(given, min_rows):
    options = read_options(given, "options", "here", ("",), "")
    assert options.policy.min_rows == min_rows
    assert f"in chunks of at least {min_rows} rows," in roles_line([sparse_role()], options, "stock")


@given(
    requests=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 400), st.booleans()), min_size=1, max_size=12),
    min_rows=st.sampled_from([2, 16, 64]),
    dense_below=st.sampled_from([0, 200, 500]),
)
def test_every_row_is_in_exactly_one_place(requests, min_rows, dense_below):
    rows, context, prefilling = zip(*requests, strict=True)
    starts, lengths = [0, *accumulate(rows)], list(map(sum, zip(rows, context, strict=True)))
    split = split_step(StepRequests(starts, lengths, prefilling), DensePolicy(dense_below, min_rows))
    runs = zip(starts, starts[1:], lengths, prefilling, strict=False)
    expected = [
        SparseRequest(index, start, stop, length)
        for index, (start, stop, length, is_prefill) in enumerate(runs)
        if is_prefill and stop - start >= min_rows and length >= dense_below
    ]
    assert list(split.sparse) == expected
    assert split.sparse_tokens == sum(each.stop - each.start for each in expected)
    covered = sorted((each.start, each.stop) for each in (*split.sparse, *split.stock))
    assert [edge for pair in covered for edge in pair] == sorted(edge for pair in covered for edge in pair)
    assert sum(stop - start for start, stop in covered) == starts[-1]
    for span in split.stock:
        assert (span.start, span.stop) == (starts[span.first_request], starts[span.end_request])
        # vLLM's split_attn_metadata needs rows in the first and the last request
        assert rows[span.first_request] > 0 < rows[span.end_request - 1]
    assert split.sparse_tokens + split.dense_tokens == sum(
        n for n, is_prefill in zip(rows, prefilling, strict=True) if is_prefill
    )
