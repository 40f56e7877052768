"""Keys and values that no row sees may hold NaN, on every path of attention."""

import pytest
import torch

from tests.attention_calls import CPP_ERROR, SINKS, call, flexprefill_attention, padding
from tests.expected import visible_pairs

NAN = float("nan")
PROBLEMS = {
    "behind a chunk": {"q_len": 100, "kv_len": 200, "q_offset": torch.tensor([70, 3]), "batch": 2},
    "behind a chunk, one row": {"q_len": 100, "kv_len": 200, "q_offset": torch.tensor(70)},
    "behind a chunk, an int": {"q_len": 100, "kv_len": 200, "q_offset": 41},
    "padding": {"q_len": 200, "attention_mask": padding(200, ("left", 70), ("holes", 7)), "batch": 2},
    "one row": {"q_len": 1, "kv_len": 200, "q_offset": torch.tensor(70)},
    "one row, padding": {"q_len": 1, "kv_len": 200, "attention_mask": padding(200, ("left", 70))},
}
BEFORE_THE_KERNEL = ["behind a chunk", "behind a chunk, one row", "padding"]
SCORES = {
    "SDPA": {}, "window": {"window": 50}, "softcap": {"softcap": 3.0}, "sinks": {"sinks": SINKS},
    "log-sum-exp": {"return_lse": True},
}  # fmt: skip
SPARSE = [
    pytest.param(name, scores, marks=pytest.mark.slow if scores and name != "padding" else [], id=f"{kind}-{name}")
    for kind, scores in (("plain", {}), ("sinks", {"sinks": SINKS}))
    for name in BEFORE_THE_KERNEL
]


def spoiled(it):
    """Key and value with NaN wherever no row can see."""
    absent = ~visible_pairs(it).any(1)[:, None, :, None]
    assert absent.any()
    return it.key.masked_fill(absent, NAN), it.value.masked_fill(absent, NAN)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_dense_attention_does_not_see_them(problem, scores):
    it = call(**problem)
    key, value = spoiled(it)
    arguments = {**it.keywords(), **scores}
    clean = flexprefill_attention(it.query, it.key, it.value, **arguments)
    found = flexprefill_attention(it.query, key, value, **arguments)
    torch.testing.assert_close(found, clean, atol=1e-6, rtol=1e-6)


@pytest.mark.attention
@CPP_ERROR
@pytest.mark.parametrize(("name", "scores"), SPARSE)
def test_sparse_attention_does_not_see_them(name, scores):
    it = call(**PROBLEMS[name])
    clean = it.attend(**scores)
    it.key, it.value = spoiled(it)
    assert torch.equal(it.attend(**scores), clean)


def test_gradients_of_dense_attention_do_not_see_them():
    it = call(**PROBLEMS["padding"])
    gradients = []
    for key, value in ((it.key, it.value), spoiled(it)):
        tensors = [x.clone().requires_grad_() for x in (it.query, key, value)]
        flexprefill_attention(*tensors, **it.keywords()).square().sum().backward()
        gradients.append([x.grad for x in tensors])
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)
