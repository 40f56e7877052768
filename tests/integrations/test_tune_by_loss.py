"""`tune(gradient=True)`: errors weighed by the gradient of the loss."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.flex.dense import dense_attention
from flexmask.integrations.huggingface.prefill import opened
from flexmask.integrations.record import PrefillRun
from flexmask.integrations.tune.probe import MOST_SCORED, backward_through_loss
from tests.integrations.common import TUNE, checkpointed
from tests.integrations.families import VOCABULARY

OPTIONS = {**TUNE, "density": 1.0}


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


@pytest.mark.parametrize("length", [530, MOST_SCORED + 60])
def test_gradients_are_those_of_the_next_token_loss(model, length):
    prompt = torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    scored = torch.linspace(0, length - 2, min(length - 1, MOST_SCORED)).round().long()
    assert (scored[-1], scored.unique().numel()) == (length - 2, len(scored))
    expected = gradients_of_attention(model, prompt, scored)
    outs = []

    def probe(call):
        outs.append(dense_attention(call.inputs)[0])
        outs[-1].retain_grad()
        return outs[-1]

    with opened(model, PrefillRun(), probe) as block:
        backward_through_loss(block, prompt[0])
    for out, wanted in zip(outs, expected, strict=True):
        assert wanted.abs().max() > 1e-5
        torch.testing.assert_close(out.grad, wanted, atol=1e-7, rtol=1e-3)


class GivesEveryLogit(LlamaForCausalLM):
    def forward(self, input_ids, use_cache=None):
        return super().forward(input_ids, use_cache=use_cache)


@pytest.mark.parametrize("how", ["every logit", "checkpoints", "inference mode"])
def test_other_models_and_callers_get_the_same(model, prompt, how):
    expected, calls = flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS), []
    if how == "every logit":
        other = GivesEveryLogit(model.config).eval()
        other.load_state_dict(model.state_dict())
        model = other
    elif how == "checkpoints":
        checkpointed(model)
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda module, given: calls.append(module))
    with torch.inference_mode(how == "inference mode"):
        found = flexmask_hf.tune(model, prompt.clone(), gradient=True, **OPTIONS)
    assert len(calls) == 1 + (how == "checkpoints")
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


def test_the_model_is_left_as_it_was(model, prompt):
    model.lm_head.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == before[name]
        assert parameter.grad is None
    assert not model.get_input_embeddings()._forward_hooks
    model.lm_head.register_forward_pre_hook(lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        flexmask_hf.tune(model, prompt, gradient=True, **OPTIONS)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert not model.get_input_embeddings()._forward_hooks
    assert model.config._attn_implementation == "sdpa"


def test_reentrant_checkpoints_are_refused(model, prompt):
    with pytest.raises(NotImplementedError, match="tune needs checkpoints with use_reentrant=False"):
        flexmask_hf.tune(checkpointed(model, use_reentrant=True), prompt, gradient=True, **OPTIONS)
    assert model.config._attn_implementation == "sdpa"
