"""The kernel for transformers' hub interface, loaded from the repository's folder by the package ``kernels``."""

import pytest
import torch
from transformers.utils.import_utils import is_kernels_available

from tests.integrations.common import make_model
from tests.repository import ROOT

kernels = pytest.importorskip("kernels")
FOLDER = ROOT / "hub_kernel"


@pytest.fixture
def kernel():
    return kernels.get_local_kernel(FOLDER)


class Layer(torch.nn.Module):
    is_causal = True


def tensors(q_len=40, kv_len=40):
    return torch.randn(2, 4, q_len, 16), torch.randn(2, 2, kv_len, 16), torch.randn(2, 2, kv_len, 16)


@pytest.mark.parametrize("q_len", [40, 1])
def test_the_kernel_attends(kernel, q_len):
    query, key, value = tensors(q_len)
    position = 40 - q_len + torch.arange(q_len)[:, None]
    seen = torch.arange(40) <= position
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, scale=0.3, enable_gqa=True)
    found, weights = kernel.flash_attn_forward(Layer(), query, key, value, None, scaling=0.3)
    assert weights is None and kernel.supports_flash_attn
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_arguments_that_the_hub_kernel_does_not_support_are_refused(kernel):
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="takes no dense attention mask"):
        kernel.flash_attn_forward(Layer(), *tensors(), mask)
    with pytest.raises(NotImplementedError, match=r"no dropout; call model\.eval"):
        kernel.flash_attn_forward(Layer(), *tensors(), None, dropout=0.1)
    with pytest.raises(NotImplementedError, match="serves causal attention"):
        kernel.flash_attn_forward(Layer(), *tensors(), None, is_causal=False)
    with pytest.raises(NotImplementedError, match="no packed prompts; got cu_seq_lens_q"):
        kernel.flash_attn_forward(Layer(), *tensors(), None, cu_seq_lens_q=torch.tensor([0, 40]))


@pytest.mark.skipif(not is_kernels_available(), reason="needs the release of kernels that transformers accepts")
def test_a_model_loads_the_hub_kernel_by_name(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"someone/flexmask={FOLDER}")
    model = make_model()
    tokens = torch.randint(0, 64, (2, 40))
    with torch.no_grad():
        expected = model(tokens).logits
        model.set_attn_implementation("someone/flexmask", allow_all_kernels=True)
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=1e-4)
        padding = torch.ones_like(tokens)
        padding[0, :5] = 0
        with pytest.raises(NotImplementedError, match="takes no dense attention mask"):
            model(tokens, attention_mask=padding)
