"""`tune(gradient=True)`: errors weighed by the gradient of the loss."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

import flexmask.integrations.huggingface as flexmask_hf
import flexmask.integrations.tune.loss_gradient as loss_gradient
import flexmask.integrations.tune.probe as head_probe
from flexmask.integrations.tune.head_errors import head_errors
from tests.integrations import tune_calls
from tests.integrations.common import MARKS

pytestmark = MARKS

OPTIONS = {**tune_calls.OPTIONS, "density": 1.0}


@pytest.fixture
def gradients(monkeypatch):
    """Gradients that the layers' errors were weighed by."""
    seen = []

    def recorded(inputs, config, gammas, max_mask_bytes, gradient=None):
        seen.append(gradient)
        return head_errors(inputs, config, gammas, max_mask_bytes, gradient)

    monkeypatch.setattr(head_probe, "head_errors", recorded)
    return seen


def gradients_of_attention(model, prompt, scored):
    """By layer (1, num_heads, q_len, head_dim), from a loss of all logits."""
    kept = []

    def keep(module, given):
        given[0].retain_grad()
        kept.append(given[0])

    hooks = [layer.self_attn.o_proj.register_forward_pre_hook(keep) for layer in model.model.layers]
    with torch.enable_grad():
        model.requires_grad_()
        logits = model(prompt, use_cache=False).logits[0]
        losses = F.cross_entropy(logits[:-1], prompt[0, 1:], reduction="none")
        (losses[scored].sum() / len(scored) ** 0.5).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return [x.grad.unflatten(-1, (4, -1)).transpose(1, 2) for x in kept]


@pytest.mark.parametrize("most", [4096, 40])
def test_gradients_are_those_of_the_next_token_loss(model, prompt, gradients, monkeypatch, most):
    monkeypatch.setattr(loss_gradient, "MOST_SCORED", most)
    length = prompt.shape[1]
    scored = torch.arange(length - 1) if most > length else torch.linspace(0, length - 2, most).round().long()
    assert scored[-1] == length - 2
    expected = gradients_of_attention(model, prompt, scored)
    flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    assert len(gradients) == len(expected) == 2
    for found, wanted in zip(gradients, expected, strict=True):
        assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(found, wanted, atol=1e-7, rtol=1e-3)


def test_a_model_that_cannot_choose_its_logits_is_served(model, prompt, gradients, monkeypatch):
    expected = flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids, use_cache=None: forward(input_ids, use_cache=use_cache))
    found = flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    assert torch.tensor(found.curve) == pytest.approx(torch.tensor(expected.curve), rel=1e-3, abs=1e-9)


def test_a_head_that_nothing_reads_costs_nothing(model, prompt):
    # head 1 of layer 0 is cut off from the loss
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.view(-1, 4, model.config.head_dim)[:, 1] = 0
    rows = flexmask_hf.tune(model, prompt, **OPTIONS).rows(every_gamma=True)
    assert max(row["error"] for row in rows if (row["layer"], row["head"]) == (0, 1)) > 0.01
    result = flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    errors = {(row["layer"], row["head"], row["gamma"]): row["error"] for row in result.rows(every_gamma=True)}
    for (layer, head, gamma), error in errors.items():
        assert (error > 0) == ((layer, head) != (0, 1) and gamma < 1), (layer, head, gamma)
    # it is the first to lose its blocks
    cheapest = result.at(error=0).rows()
    assert [row["gamma"] for row in cheapest] == [0.2 if (row["layer"], row["head"]) == (0, 1) else 1.0 for row in cheapest]


def test_errors_predict_the_change_of_the_loss(model, prompt):
    with torch.no_grad():
        expected = F.cross_entropy(model(prompt).logits[0, :-1].double(), prompt[0, 1:], reduction="sum")
    scored = torch.arange(prompt.shape[1] - 1)
    gradient = gradients_of_attention(model, prompt, scored)[1] * len(scored) ** 0.5
    change = torch.zeros_like(gradient)
    change[0, 2, 300] = 1e-2 * torch.randn(gradient.shape[-1], generator=torch.Generator().manual_seed(0))
    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
        lambda module, given: (given[0] + change.transpose(1, 2).flatten(2),)
    )
    with torch.no_grad():
        found = F.cross_entropy(model(prompt).logits[0, :-1].double(), prompt[0, 1:], reduction="sum")
    hook.remove()
    assert float(found - expected) == pytest.approx(float((gradient * change).sum()), rel=0.05)
    assert abs(float(found - expected)) > 1e-4


def test_checkpointed_layers_give_the_same(model, prompt):
    expected = flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    model.train()
    # the name of transformers 5.23 on, and the older one
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    calls = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda module, given: calls.append(module))
    found = flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    assert len(calls) == 2
    assert torch.tensor(found.curve) == pytest.approx(torch.tensor(expected.curve), rel=1e-3, abs=1e-9)


def test_the_model_is_left_as_it_was(model, prompt, monkeypatch):
    model.lm_head.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == before[name]
        assert parameter.grad is None
    assert not model.get_input_embeddings()._forward_hooks
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert not model.get_input_embeddings()._forward_hooks
    assert model.config._attn_implementation == "sdpa"


def test_it_goes_on_where_it_was_interrupted(model, tokens, tmp_path, gradients):
    expected = flexmask_hf.tune(model, tokens, gradient=True, **OPTIONS)
    path = tmp_path / "tune.json"
    flexmask_hf.tune(model, tokens, gradient=True, resume=path, **OPTIONS)
    again = flexmask_hf.tune(model, tokens, gradient=True, resume=path, **OPTIONS)
    assert len(gradients) == 8  # two prompts of two layers, twice
    assert again.curve == expected.curve
    with pytest.raises(ValueError, match=r"resume must be a file of the same .* is of another errors"):
        flexmask_hf.tune(model, tokens, resume=path, **OPTIONS)


def test_a_caller_in_inference_mode_gets_the_same(model, prompt):
    expected = flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    with torch.inference_mode():
        found = flexmask_hf.tune(model, prompt.clone(), gradient=True, **OPTIONS)
    assert found.curve == expected.curve


def test_reentrant_checkpoints_are_refused(model, prompt):
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": True})
    with pytest.raises(NotImplementedError, match="tune needs checkpoints with use_reentrant=False"):
        flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    assert model.config._attn_implementation == "sdpa"


def test_gradient_must_be_a_flag(model, prompt):
    with pytest.raises(TypeError, match="gradient must be True or False; got 'loss'"):
        flexmask_hf.tune(model, prompt, gradient="loss", **OPTIONS)
