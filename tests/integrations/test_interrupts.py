"""A KeyboardInterrupt between any two lines in which a block is entered or left."""

import contextlib
import gc

import pytest
import torch

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.prefill import opened
from flexmask.integrations.record import PrefillRun
from flexmask.integrations.tune.probe import backward_through_loss
from tests.integrations.test_overlapping_blocks import is_untouched
from tests.interrupts import in_another_thread, interrupted

# of what enters and leaves, without the forward and the checks of options
FILES = ("session.py", "prefill.py", "registration.py", "precision.py", "locking.py", "probe.py")


def entered(model, kept, ids):
    with flexmask_hf.sparse_prefill(model, gamma=0.8):
        pass


def kept_by_the_program(model, kept, ids):
    with kept:
        pass


def twice(model, kept, ids):
    with kept, kept:
        pass


def in_a_stack(model, kept, ids):
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept)


def as_a_decorator(model, kept, ids):
    kept(lambda: None)()


def with_an_error(model, kept, ids):
    with contextlib.suppress(KeyError), kept:
        raise KeyError


def as_inspect_and_tune_do(model, kept, ids):
    with opened(model, PrefillRun()) as block:
        backward_through_loss(block, ids[0])


CALLS = [entered, kept_by_the_program, twice, in_a_stack, as_a_decorator, with_an_error, as_inspect_and_tune_do]


@pytest.fixture
def _fast_collections():
    """Collections look at what the test makes, and not at torch's many objects."""
    gc.freeze()
    yield
    gc.unfreeze()


def next_block(model):
    with torch.no_grad(), flexmask_hf.sparse_prefill(model, gamma=0.7):
        pass


def next_prompt(model, ids, expected):
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.usefixtures("_fast_collections")
@pytest.mark.parametrize(
    ("call", "then"),
    [*((each, "a block") for each in CALLS), *((each, "a prompt") for each in (entered, kept_by_the_program))],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_the_model_gets_its_own_back(model, prompt, call, then):
    ids = prompt[:, :48]
    flexmask_hf.configure(model, gamma=0.9)
    before, expected = model.config.flexmask_config, model(ids).logits
    kept = flexmask_hf.sparse_prefill(model, gamma=0.8)
    number, left = 0, 0
    for place in interrupted(lambda: call(model, kept, ids), FILES):
        was_left = model.config._attn_implementation != "sdpa"
        number, left = number + 1, left + was_left
        if call is in_a_stack and was_left:
            gc.collect()  # an interrupted ExitStack is part of a cycle
        if then == "a block":
            in_another_thread(lambda: next_block(model))
        else:
            next_prompt(model, ids, expected)
        assert model.config.flexmask_config is before, place
        assert all(parameter.requires_grad for parameter in model.parameters()), place
        assert not model.get_input_embeddings()._forward_hooks, place
        del model.config.flexmask_config
        assert is_untouched(model), place
        model.config.flexmask_config = before
    assert number > 30
    assert left > 5
