"""A model of fake tensors in a block gives shapes, as it does without one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.common import SPARSE, make_model, padded

FORMS = {
    "a prompt": lambda tokens: {},
    "padded": lambda tokens: {"attention_mask": padded(tokens)},
    "no cache": lambda tokens: {"use_cache": False},
    "no cache, positions": lambda tokens: {"use_cache": False, "position_ids": torch.arange(tokens.shape[1])[None]},
}


@pytest.fixture(params=["Llama", "Mistral"])
def fake(request, tokens):
    """A mode, and a model of its tensors."""
    mode = FakeTensorMode()
    with mode:
        return mode, make_model(request.param)


@pytest.mark.attention
@pytest.mark.parametrize("options", [{}, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_gives_the_shapes_that_it_gives_without_a_block(fake, tokens, form, options):
    mode, model = fake
    given = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in FORMS[form](tokens).items()}
    tokens = mode.from_tensor(tokens)
    with mode:
        expected = model(tokens, **given).logits
        with flexmask_hf.sparse_prefill(model, **options, collect_masks=True) as run:
            found = model(tokens, **given)
    assert found.logits.shape == expected.shape
    assert not run.unreached
    # nothing without values is kept
    assert run.summary().prefills == 0
    assert set(run.masks[1]) == {None}


def test_what_needs_values_refuses_a_model_of_fake_tensors(fake, prompt):
    mode, model = fake
    prompt = mode.from_tensor(prompt)
    with mode:
        with pytest.raises(ValueError, match=r"inspect_prefill needs a model with values; got one of fake tensors"):
            flexmask_hf.inspect_prefill(model, prompt)
        with pytest.raises(ValueError, match=r"tune needs a model with values; got one of fake tensors"):
            flexmask_hf.tune(model, [prompt], density=0.5)
