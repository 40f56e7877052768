"""The plug-in in vLLM on a GPU, in bfloat16, compiled and with CUDA graphs, against FLASH_ATTN and the adapter for transformers.

Half precision rounds more than sparse and dense kernels differ: the bound is what the stock engine's own answers differ by when
the same prompt comes in other chunks.
"""

from __future__ import annotations

import pytest

from tests.vllm.agreement import SAME, differences, same_tokens, summary

pytest.importorskip("vllm", reason="needs vLLM for CUDA")
pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture
def stock(written):
    return written("engine_run", "stock", "cuda")


@pytest.fixture
def keep_all(written):
    return written("engine_run", "keep_all", "cuda")


@pytest.fixture
def sparse(written):
    return written("engine_run", "sparse", "cuda")


@pytest.fixture
def adapter(written):
    return written("adapter_run", "cuda")


@pytest.fixture
def rounding(stock):
    """Mean and largest difference of the stock engine's log-probabilities between two ways to cut one prompt."""
    return summary(differences(stock["chunks"], stock["rechunked"]))


def test_the_plug_in_serves(keep_all, stock):
    assert keep_all["backends"] == ["SparseFlashAttention"]
    assert stock["backends"] == ["FlashAttentionBackend"]
    assert keep_all["counters"]["sparse"] > 3001 + 1700 + 5000 + 3000


@pytest.mark.parametrize("asked", SAME)
def test_gamma_one_gives_the_stock_backend_s_answers(asked, stock, keep_all, rounding):
    agree, total = same_tokens(stock[asked], keep_all[asked])
    assert agree == total
    found = summary(differences(stock[asked], keep_all[asked]))
    assert found["mean"] <= 2 * rounding["mean"]
    assert found["most"] <= 2 * rounding["most"]


@pytest.mark.parametrize("fault", ["another_page", "offset_off_by_one"])
def test_a_planted_fault_is_caught(fault, stock, keep_all, rounding):
    assert summary(differences(stock["odd_chunks"], keep_all["faults"][fault]))["mean"] > 4 * rounding["mean"]


@pytest.mark.parametrize("asked", ["whole", "chunks", "odd_chunks"])
def test_sparse_prefill_is_the_adapter_s_with_the_same_chunks(asked, adapter, sparse, stock, rounding):
    pairs = zip(sparse[asked][0]["prompt_logprobs"], adapter[asked]["prompt_logprobs"], strict=True)
    found = summary([abs(a - b) for a, b in pairs])
    # rounding amplified: a score that rounds differently changes which blocks are kept
    assert found["mean"] <= 5 * rounding["mean"]
    assert sparse[asked][0]["tokens"][0] == adapter[asked]["token"]
    assert summary(differences(stock[asked], sparse[asked]))["mean"] > 2 * found["mean"]


def test_requests_compile_nothing(keep_all, sparse, stock):
    assert [each["compiled_by_requests"] for each in (keep_all, sparse, stock)] == [0, 0, 0]
