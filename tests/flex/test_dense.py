"""The dense path: which calls take it; its output and log-sum-exp. tests/flex/test_sinks.py has its gradients."""

import pytest
import torch

from flexmask import SelectionStats
from flexmask.flex import dense
from tests.attention_calls import call, flexprefill_attention, padding
from tests.comparisons import assert_same_attention
from tests.expected import masked_attention


@pytest.mark.parametrize(
    "keywords",
    [
        {"q_len": 100}, {"q_len": 60, "kv_len": 100}, {"q_len": 60, "kv_len": 100, "q_offset": 13},
        {"q_len": 100, "attention_mask": padding(100, ("left", 30), ("all", 0)), "batch": 2},
        {"q_len": 100, "scores": {"window": 17, "scale": 0.4}}, {"q_len": 100, "scores": {"softcap": 2.0}},
        {"q_len": 60, "kv_len": 100, "scores": {"softcap": 2.0, "window": 9}, "attention_mask": padding(100, ("holes", 5))},
        {"q_len": 100, "heads": (3, 1), "head_dims": (32, 80), "dtype": torch.bfloat16}, {"q_len": 1, "kv_len": 100},
        {"q_len": 1, "kv_len": 100, "scores": {"softcap": 2.0}, "q_offset": torch.tensor(40)},
        {"q_len": 1, "kv_len": 100, "attention_mask": padding(100, ("left", 30), ("right", 3)), "batch": 2},
    ],
)  # fmt: skip
def test_short_prompts_and_single_rows_run_dense(keywords):
    it = call(**keywords)
    decodes = keywords["q_len"] == 1
    below = {} if decodes else {"dense_below": 101}
    expected, lse = it.under(torch.ones_like(it.search().keep))
    out, stats = it.attend(return_stats=True, **below)
    assert stats.dense is True and (stats.density == 1).all()
    assert (stats.coverage == 1).all() and stats.js_distance.isnan().all()
    assert not stats.is_query_aware.any() and out.dtype == it.query.dtype
    assert_same_attention(out, expected)
    again, got, more = it.attend(return_lse=True, return_stats=True, **below)
    assert isinstance(more, SelectionStats)
    assert_same_attention(again, expected)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keywords", [{"return_lse": True}, {"return_stats": True}], ids=["written out", "SDPA"])
def test_dense_in_parts_is_dense_in_one(monkeypatch, keywords):
    scores = {"window": 40} if "return_stats" in keywords else {"softcap": 2.0, "window": 40}
    it = call(q_len=70, kv_len=100, scores=scores, attention_mask=padding(100, ("left", 50)))
    whole = it.attend(dense_below=101, **keywords)
    # 13 rows at a time
    for name, most in (("_MOST_SCORES", it.query.shape[1] * 100 * 13), ("_MOST_VISIBLE", 100 * 13)):
        monkeypatch.setattr(dense, name, most)
    parts = it.attend(dense_below=101, **keywords)
    torch.testing.assert_close(parts[0], whole[0], atol=1e-6, rtol=0)
    if "return_lse" in keywords:
        torch.testing.assert_close(parts[1], whole[1], atol=1e-6, rtol=0)


@pytest.mark.gpu
def test_float32_grouped_heads_write_out_no_scores(cuda):
    tokens = 8192
    query, key, value = (torch.randn(1, heads, tokens, 64, device=cuda) for heads in (16, 4, 4))
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    out = flexprefill_attention(query, key, value, dense_below=tokens + 1)
    # the scores alone would take 4 GiB
    assert torch.cuda.max_memory_allocated(cuda) - before < 2**29
    seen = torch.ones(64, tokens, dtype=torch.bool, device=cuda).tril(tokens - 64)
    exact, _ = masked_attention(query[:, :, -64:], key, value, seen)
    torch.testing.assert_close(out[:, :, -64:].double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [{"is_causal": True}, {"attn_mask": torch.ones(1, 1, 8192, 8192, dtype=torch.bool).tril()}])
def test_wide_heads_in_groups_write_out_no_scores(mask):
    """As in Gemma 4's full-attention layers."""
    query, key, value = (torch.randn(1, heads, 8192, 512, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    mask = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in mask.items()}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = dense.sdpa(query, key, value, 512**-0.5, **mask)
    # the keys and values once more per query head, and the mask in bfloat16; the scores would be 1 GiB and more
    assert torch.cuda.max_memory_allocated() - before < 2**29
    assert out.isfinite().all()
