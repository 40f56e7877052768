"""A KeyboardInterrupt between any two lines in which a block is entered or left."""

import contextlib
import gc

import pytest
import torch

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.prefill import opened
from flexmask.integrations.record import PrefillRun
from tests.integrations.common import is_untouched
from tests.interrupts import in_another_thread, interrupted

# of what enters and leaves, without the forward and the checks of options
FILES = ("session.py", "prefill.py", "registration.py", "precision.py", "locking.py")


HOW = ("entered", "kept", "kept twice", "in a stack", "as a decorator", "with an error", "as inspect does")


def enter_and_leave(how, model, kept):
    """Use a new block, or one that the program keeps."""
    match how:
        case "entered":
            with flexmask_hf.sparse_prefill(model, gamma=0.8):
                pass
        case "kept":
            with kept:
                pass
        case "kept twice":
            with kept, kept:
                pass
        case "in a stack":
            with contextlib.ExitStack() as stack:
                stack.enter_context(kept)
        case "as a decorator":
            kept(lambda: None)()
        case "with an error":
            with contextlib.suppress(KeyError), kept:
                raise KeyError
        case "as inspect does":
            with opened(model, PrefillRun()):
                pass


@pytest.fixture
def _fast_collections():
    """Collections look at what the test makes, and not at torch's many objects."""
    gc.freeze()
    yield
    gc.unfreeze()


def next_block(model):
    with torch.no_grad(), flexmask_hf.sparse_prefill(model, gamma=0.7):
        pass


@pytest.mark.usefixtures("_fast_collections")
@pytest.mark.parametrize(("how", "then"), [*((how, "a block") for how in HOW), *((how, "a prompt") for how in HOW[:2])])
def test_the_model_gets_its_own_back(model, prompt, how, then):
    ids = prompt[:, :48]
    flexmask_hf.configure(model, gamma=0.9)
    before, expected = model.config.flexmask_config, model(ids).logits
    kept = flexmask_hf.sparse_prefill(model, gamma=0.8)
    number, left = 0, 0
    for place in interrupted(lambda: enter_and_leave(how, model, kept), FILES):
        was_left = model.config._attn_implementation != "sdpa"
        number, left = number + 1, left + was_left
        if how == "in a stack" and was_left:
            gc.collect()  # an interrupted ExitStack is part of a cycle
        if then == "a block":
            in_another_thread(lambda: next_block(model))
        else:
            assert torch.equal(model(ids).logits, expected)
        assert model.config.flexmask_config is before, place
        del model.config.flexmask_config
        assert is_untouched(model), place
        model.config.flexmask_config = before
    assert number > 30
    assert left > 5
