"""Dense attention of packed sequences in one FlexAttention call."""

import pytest
import torch
import torch._dynamo
from torch import Tensor

from tests.attention_calls import SINKS
from tests.packs import alone, assert_close, one_call, pack


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
