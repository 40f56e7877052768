"""sparse_attention_varlen refuses wrong bounds and arguments by name."""

from typing import Any

import pytest
import torch

from flexmask import sparse_attention_varlen

RIGHT = {"q_bounds": [0, 30, 50], "k_bounds": [0, 30, 60]}
BOUNDS_REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "first": ([1, 30, 50], ValueError, r"cu_seqlens_q must begin at 0; got 1"),
    "total": ([0, 30, 49], ValueError, r"cu_seqlens_q must end at total_q = 50; got 49"),
    "decreasing": ([0, 50, 30, 50], ValueError, r"cu_seqlens_q must not decrease; got 50, then 30 for sequence 1"),
    "one bound": ([50], ValueError, r"cu_seqlens_q must hold at least two bounds"),
    "other number": ([0, 10, 30, 50], ValueError, r"cu_seqlens_k must have as many entries as cu_seqlens_q, 4; got 3"),
    "more rows": ([0, 31, 50], ValueError, r"cu_seqlens_q must give .* sequence 0 has 31 rows and 30 keys"),
    "floats": ([0.0, 30.0, 50.0], TypeError, r"cu_seqlens_q\[0\] must be an int; got float"),
    "bools": (torch.tensor([False, True]), TypeError, r"cu_seqlens_q must be integer; got torch.bool"),
    "floating tensor": (torch.tensor([0.0, 30.0, 50.0]), TypeError, r"cu_seqlens_q must be integer; got torch.float32"),
    "two dimensions": (
        torch.tensor([[0, 30, 50]]),
        ValueError,
        r"cu_seqlens_q must be \(num_sequences \+ 1,\); got shape \(1, 3\)",
    ),
    "text": ("0", TypeError, r"cu_seqlens_q must be a tensor or a sequence of ints; got str"),
    "meta": (torch.tensor([0, 30, 50]).to("meta"), ValueError, r"cu_seqlens_q must hold values; got a tensor on the meta device"),
    "none": (None, TypeError, r"cu_seqlens_q must be a tensor or a sequence of ints; got NoneType"),
}


@pytest.mark.parametrize("name", BOUNDS_REFUSED)
def test_wrong_bounds_are_refused_by_name(name):
    bounds, error, message = BOUNDS_REFUSED[name]
    query, key = torch.randn(50, 4, 16), torch.randn(60, 2, 16)
    sparse_attention_varlen(query, key, key, RIGHT["q_bounds"], RIGHT["k_bounds"])
    with pytest.raises(error, match=message):
        sparse_attention_varlen(query, key, key, bounds, RIGHT["k_bounds"])


def test_bounds_of_keys_on_the_meta_device_are_refused_too():
    query, key = torch.randn(50, 4, 16), torch.randn(60, 2, 16)
    bounds = torch.tensor([0, 30, 60]).to("meta")
    for q_bounds in ([0, 30, 50], torch.tensor([0, 30, 50])):
        with pytest.raises(ValueError, match=r"^cu_seqlens_k must hold values; got a tensor on the meta device$"):
            sparse_attention_varlen(query, key, key, q_bounds, bounds)


@pytest.mark.parametrize("keys", [0, 60])
def test_a_pack_without_rows_is_refused(keys):
    query, key = torch.randn(0, 4, 16), torch.randn(keys, 2, 16)
    with pytest.raises(ValueError, match=r"^query must not be empty; got shape \(0, 4, 16\)$"):
        sparse_attention_varlen(query, key, key, [0, 0], [0, keys])


@pytest.mark.parametrize("most", [30, 31, 60, 10**6, 2**70])
def test_longest_sequences_are_upper_bounds(most):
    query, key = torch.randn(50, 4, 16), torch.randn(60, 2, 16)
    given = (query, key, key, [0, 30, 50], [0, 30, 60])
    out = sparse_attention_varlen(*given, max_seqlen_q=most, max_seqlen_k=most)
    assert torch.equal(out, sparse_attention_varlen(*given))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": torch.randn(1, 50, 4, 16)}, ValueError, r"query must be \(total_q, num_heads, head_dim\); got shape"),
        ({"key": [1]}, TypeError, r"key must be a tensor \(total_k"),
        (
            {"value": torch.randn(50, 2, 16)},
            ValueError,
            r"value must have key's total_k and num_kv_heads \(60, 2\); got \(50, 2\)",
        ),
        ({"key": torch.randn(60, 2, 16).half()}, TypeError, r"key must have query's dtype"),
        ({"max_seqlen_q": 29}, ValueError, r"max_seqlen_q must be at least the longest sequence, 30 tokens; got 29"),
        ({"max_seqlen_k": 29}, ValueError, r"max_seqlen_k must be at least the longest sequence, 30 tokens; got 29"),
        ({"max_seqlen_k": torch.tensor(30)}, TypeError, r"max_seqlen_k must be an int; got Tensor"),
        ({"attention_mask": torch.ones(60)}, TypeError, r"attention_mask"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \(num_heads,\) = \(4,\)"),
        ({"backend": "triton"}, ValueError, r'backend="triton" needs a GPU'),
        ({"method": "published", "block_size": 16}, ValueError, r"method 'published' needs a whole prompt"),
        ({"method": "hybrid", "tau": 0.1}, TypeError, r"method 'hybrid' takes the options .*; got 'tau'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, error, message):
    key = torch.randn(60, 2, 16)
    given = {"query": torch.randn(50, 4, 16), "key": key, "value": key, "cu_seqlens_q": [0, 30, 50], "cu_seqlens_k": [0, 30, 60]}
    with pytest.raises(error, match=message):
        sparse_attention_varlen(**{**given, **changes})
