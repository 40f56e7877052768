"""Gradient checkpointing, which runs layers again in the backward; masks that outlive their block."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.mask import GeometryMask
from tests.integrations.common import make_model

# all dense, since CPUs have no other gradients: the reason of a call shows whose options it ran with
DENSE = {"dense_below": 10**6}
ENDED = "used after its sparse_prefill block has ended; call backward inside the block"

reentrant = pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])


@pytest.fixture(autouse=True)
def _gradients(no_gradients):
    with torch.enable_grad():
        yield


def checkpointed(model, use_reentrant=False):
    model.train()
    # the name of transformers 5.23 on, and the older one
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    return model


def loss_of(model, tokens):
    return model(tokens, labels=tokens, use_cache=False).loss


def gradients_of(model):
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


@reentrant
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_backward_inside_the_block_gives_the_gradients_of_the_model(family, use_reentrant, prompt):
    model = checkpointed(make_model(family), use_reentrant)
    loss_of(model, prompt).backward()
    expected = gradients_of(model)
    with flexmask_hf.sparse_prefill(model, **DENSE):
        loss_of(model, prompt).backward()
    torch.testing.assert_close(gradients_of(model), expected, atol=1e-6, rtol=1e-4)


@reentrant
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_backward_after_the_block_is_refused_by_name(attention, family, use_reentrant, prompt):
    model = checkpointed(make_model(family), use_reentrant)
    model.set_attn_implementation(attention)
    with flexmask_hf.sparse_prefill(model, **DENSE):
        loss = loss_of(model, prompt)
    with pytest.raises(NotImplementedError, match=ENDED):
        loss.backward()


@pytest.mark.parametrize("how", ["", "compiled layers", "another thread"])
def test_a_layer_runs_again_under_the_block_of_its_forward(how, model, prompt):
    """Autograd's own threads compute on GPUs."""
    model = checkpointed(model)
    if how == "compiled layers":
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.self_attn.compile(backend="eager")
    with flexmask_hf.sparse_prefill(model, dense_below=1000) as outer, ThreadPoolExecutor(1) as pool:
        loss = loss_of(model, prompt)
        with flexmask_hf.sparse_prefill(model, dense_below=2000) as inner:
            backward = pool.submit(loss.backward).result if how == "another thread" else loss.backward
            backward()
    assert inner.reasons == {}
    assert outer.reasons == dict.fromkeys((0, 1), [f"{prompt.shape[1]} tokens < dense_below 1000"] * 2)
    assert model.lm_head.weight.grad is not None


def kept_mask(model, prompt):
    masks = []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, given: masks.append(given["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad(), flexmask_hf.sparse_prefill(model, **DENSE):
        model(prompt)
    hook.remove()
    return masks[0]


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_a_mask_kept_beyond_its_block_is_refused_by_name(attention, compiled, model, prompt):
    mask = kept_mask(model, prompt)
    model.set_attn_implementation(attention)
    run = torch.compile(model, backend="eager") if compiled else model
    with torch.no_grad(), pytest.raises(NotImplementedError, match=ENDED):
        run(prompt, attention_mask=mask)


def test_a_mask_that_need_not_move_is_the_same_object():
    """Plans are kept by it, and hooks of device_map move it before each layer."""
    padded = GeometryMask((1, 1, 5, 9), torch.tensor([4]), torch.ones(1, 9, dtype=torch.bool))
    for mask in (GeometryMask((1, 1, 5, 9), 4), padded):
        assert mask.to("cpu") is mask
    moved = padded.to("meta")
    assert moved is not padded and moved.attention_mask.device.type == "meta"


@pytest.mark.parametrize(
    "call",
    [
        lambda x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask),
        lambda x, mask: torch.cat([x, mask]),
        lambda x, mask: x.masked_fill(mask, 0),
        lambda x, mask: torch.where(mask, x, 0),
        lambda x, mask: mask > 0,
        lambda x, mask: 1 / mask,
    ],
)
def test_torch_refuses_a_mask_by_name(call):
    with pytest.raises(NotImplementedError, match="uses its attention mask's numbers"):
        call(torch.zeros(1, 1, 4, 4), GeometryMask((1, 1, 4, 4), 0))
