"""Attention with sinks, one more logit per head, on every path; gradients with and without."""

import pytest
import torch

from flexmask.flex.run import with_sinks
from tests.attention_calls import CPP_ERROR, SINKS, VARIANTS, assert_same_gradients, call, padding
from tests.comparisons import assert_same_attention


@pytest.mark.parametrize("gradients", [False, True])
def test_sinks_round_a_half_precision_output_once(gradients):
    out = torch.randn(1, 4, 63, 32).bfloat16()
    lse = torch.randn(1, 4, 63)
    exact = out.double() * torch.sigmoid(lse.double() - SINKS.double()[:, None])[..., None]
    with torch.set_grad_enabled(gradients):
        scaled = with_sinks(out.clone(), lse, SINKS)
    assert scaled.dtype == torch.bfloat16
    # half a unit in the last place
    torch.testing.assert_close(scaled.double(), exact, rtol=2**-8, atol=0)


WITH_SINKS = ["groups", "chunk inside a block"]
WITH_SINKS_AND_PADDING = ["everything", "bfloat16, padded chunk"]
SINKS_BY_DEVICE = [
    *(pytest.param(name, "cpu", marks=[] if name == "groups" else pytest.mark.slow) for name in WITH_SINKS),
    *(pytest.param(name, "cpu", marks=CPP_ERROR) for name in WITH_SINKS_AND_PADDING),
    *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in WITH_SINKS + WITH_SINKS_AND_PADDING),
]


@pytest.mark.attention
@pytest.mark.parametrize(("name", "device"), SINKS_BY_DEVICE)
def test_sinks_are_one_more_logit(name, device):
    it = call(**VARIANTS[name])
    keep = it.to(device).search().keep
    out, stats = it.attend(device, sinks=SINKS.to(device), return_stats=True)
    assert (stats.density < 1).any()
    assert_same_attention(out, it.under(keep, SINKS)[0])
    with pytest.raises(AssertionError, match="not close"):
        assert_same_attention(out, it.under(keep)[0])


INPUTS = ("query", "key", "value")
wanted = pytest.mark.parametrize("wanted", [(*INPUTS, "sinks"), ("sinks",), INPUTS], ids=["of all", "of sinks", "without sinks"])


@wanted
@pytest.mark.parametrize("name", ["groups", "everything"])
def test_gradients_of_the_dense_path_and_of_sinks(name, wanted):
    it, sinks = call(**VARIANTS[name]), SINKS if "sinks" in wanted else None
    assert_same_gradients(it, torch.ones_like(it.search().keep), wanted, sinks=sinks, dense_below=1000)


@pytest.mark.attention
@pytest.mark.gpu
@wanted
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_gradients_of_the_sparse_kernel_and_of_sinks(cuda, wanted, padded):
    mask, sinks = padding(600, ("left", 90)) if padded else None, SINKS if "sinks" in wanted else None
    it = call(q_len=600, block_size=64, head_dims=(64, 64), attention_mask=mask)
    assert_same_gradients(it, it.to(cuda).search().keep, wanted, cuda, sinks, dense_below=0, backend="triton")
