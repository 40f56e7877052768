"""Dense attention of packed sequences in one FlexAttention call."""

import itertools

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.flex.packed import Segment, _mask, _shared_calls, _table, attention_in_one_call, dense_attention_packed
from flexmask.varlen import segments_of
from tests.attention_calls import SINKS
from tests.packs import alone, assert_close, bounds_of, one_call, pack


@pytest.mark.parametrize("window", [None, 70, 270])
def test_mask_of_one_call_is_each_sequence_alone(window):
    q_lens, k_lens = (300, 1, 150, 129), (300, 77, 333, 600)
    segments = segments_of(bounds_of(q_lens), bounds_of(k_lens), sum(q_lens), sum(k_lens))
    mask = _mask(_table(segments, torch.device("cpu")), window, False)
    pairs = torch.zeros(mask.shape[-2:], dtype=torch.bool)
    real = torch.zeros(len(pairs), dtype=torch.bool)
    row = key = 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        back = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
        pairs[row : row + q_len, key : key + k_len] = (back >= 0) & (back < (window or 10**6))
        real[row : row + q_len] = True
        row, key = row + -(-q_len // 128) * 128, key + -(-k_len // 128) * 128
    assert pairs.shape == (row, key)
    found = create_mask(mask.mask_mod, 1, 1, row, key, device="cpu")[0, 0]
    assert torch.equal(found[real], pairs[real])
    # rows behind the last one see no key of another sequence
    blocks = found.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks.any(3).any(1))
    full = torch.zeros_like(blocks.any(3).any(1))
    for block in range(len(full)):
        full[block, mask.full_kv_indices[0, 0, block, : mask.full_kv_num_blocks[0, 0, block]].long()] = True
    assert torch.equal(full, blocks.all(3).all(1))
    assert full.any() == (window != 70)


@pytest.mark.attention
@pytest.mark.parametrize(
    "scores",
    [{}, pytest.param({"window": 270, "softcap": 3.0, "sinks": SINKS}, marks=pytest.mark.slow)],
    ids=["plain", "everything"],
)
def test_one_call_for_all_dense_sequences_is_dense_attention(device, scores):
    scores = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in scores.items()}
    inputs, q_bounds, k_bounds = pack()
    inputs = [x.to(device) for x in inputs]
    with torch.no_grad():
        expected = [x for x in alone(inputs, q_bounds, k_bounds, **scores, dense_below=10**6) if x is not None]
        out = one_call(inputs, q_bounds, k_bounds, **scores)
    assert_close(out, torch.cat(expected, 2)[0].transpose(0, 1))


def test_sequences_with_a_call_to_themselves_are_not_copied_where_sdpa_takes_them():
    def calls(lengths, return_lse=False, heads=1, v_head_dim=32, dtype=torch.float32, **fields):
        query, key, value = (
            torch.empty(1, dtype=dtype).expand(1, count, sum(lengths), size)
            for count, size in ((heads, 32), (1, 32), (1, v_head_dim))
        )
        bounds = [0, *itertools.accumulate(lengths)]
        segments = [Segment(slice(*each), slice(*each)) for each in itertools.pairwise(bounds)]
        return _shared_calls(AttentionInputs(query, key, value, 1.0, **fields), segments, return_lse)

    long = 70_000
    assert calls([300, 200, long, 1, 400]) == [[0, 1]]
    assert calls([long, long]) == []
    assert calls([300]) == []
    # SDPA would need a map of visible keys
    for given in ({"window": 4096}, {"softcap": 3.0}, {"return_lse": True}):
        assert calls([300, 200, long, 1, 400], **given) == [[0, 1], [2], [4]]
    # SDPA's fused kernels take grouped heads in half precision, of values as wide as keys
    assert calls([long, long], heads=2, dtype=torch.bfloat16) == []
    assert calls([long, long], v_head_dim=64) == []
    for unfused in ({}, {"dtype": torch.bfloat16, "v_head_dim": 64}):
        assert calls([long, long], heads=2, **unfused) == [[0], [1]]


def test_results_hold_no_more_than_their_rows(monkeypatch):
    """In copies every short sequence fills up a block."""
    monkeypatch.setattr("flexmask.flex.packed.run_flex_attention", lambda inputs, *rest: (inputs.query, inputs.query[..., 0]))
    lengths = (40, 7, 130, 1)
    query, *rest = pack(lengths, lengths)[0]
    inputs = attention_inputs(*(x.transpose(0, 1)[None] for x in (query, *rest)))
    bounds = bounds_of(lengths)
    results = attention_in_one_call(inputs, segments_of(bounds, bounds, bounds[-1], bounds[-1]), "triton", return_lse=True)
    assert torch.equal(torch.cat([out for out, _ in results], 2)[0].transpose(0, 1), query)
    for out, lse in results:
        assert lse is not None
        assert out.untyped_storage().nbytes() == query.numel() * 4
        assert lse.untyped_storage().nbytes() == query[..., 0].numel() * 4


@pytest.mark.gpu
def test_dense_sequences_share_a_call_on_a_gpu(cuda, monkeypatch):
    calls: list[int] = []
    run = attention_in_one_call
    monkeypatch.setattr(
        "flexmask.flex.packed.attention_in_one_call",
        lambda inputs, part, *rest: calls.append(len(part)) or run(inputs, part, *rest),
    )
    inputs, q_bounds, k_bounds = pack()
    inputs = [x.to(cuda) for x in inputs]
    given = attention_inputs(*(x.transpose(0, 1)[None] for x in inputs))
    segments = [each for each in segments_of(q_bounds, k_bounds, q_bounds[-1], k_bounds[-1]) if each.q_len]
    outs = dense_attention_packed(given, segments)
    assert calls == [5]  # the single row goes alone
    expected = [x for x in alone(inputs, q_bounds, k_bounds, dense_below=10**6) if x is not None]
    for (out, _), twin in zip(outs, expected, strict=True):
        assert_close(out, twin)
