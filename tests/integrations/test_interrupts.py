"""A KeyboardInterrupt between any two lines in which a block is entered or left."""

import contextlib
import gc

import pytest
import torch

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.context_manager import opened_scope
from flexmask.integrations.record import PrefillRun
from tests.integrations.common import is_open, is_untouched
from tests.interrupts import in_another_thread, interrupted

# of what enters and leaves, without the forward and the checks of options
FILES = ("scope.py", "context_manager.py", "registration.py", "locking.py")


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
            with opened_scope(model, PrefillRun()):
                pass


@pytest.fixture
def _fast_collections():
    """Collections look at what the test makes, and not at torch's many objects."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_fast_collections")
@pytest.mark.parametrize("how", HOW)
def test_the_model_runs_its_own_attention_after_an_interrupt(model, prompt, how):
    ids = prompt[:, :48]
    expected = model(ids).logits
    kept = flexmask_hf.sparse_prefill(model, gamma=0.8)
    number, left = 0, 0
    for place in interrupted(lambda: enter_and_leave(how, model, kept), FILES):
        number, left = number + 1, left + is_open(model)
        if how == "in a stack" and is_open(model):
            gc.collect()  # an interrupted ExitStack is part of a cycle
        assert torch.equal(model(ids).logits, expected), place
        assert is_untouched(model), place
    assert number > 30
    assert left > 5


def test_no_lock_stays_held(model):
    def next_block():
        with torch.no_grad(), flexmask_hf.sparse_prefill(model, gamma=0.7):
            pass

    for place in interrupted(lambda: enter_and_leave("entered", model, None), FILES):
        in_another_thread(next_block)
        assert is_untouched(model), place


def test_a_compiled_forward_that_an_interrupt_left_in_its_block_runs_dense(model, tokens):
    expected = model(tokens).logits
    compiled = torch.compile(model, backend="eager")
    with flexmask_hf.sparse_prefill(model, method="streaming_llm", block_size=32, window_blocks=1, sink_blocks=1, dense_below=0):
        sparse = compiled(tokens).logits
        name = model.config._attn_implementation
    model.config._attn_implementation_internal = name
    assert (compiled(tokens).logits - expected).abs().max() < 1e-4
    assert (sparse - expected).abs().max() > 1e-2
    with flexmask_hf.sparse_prefill(model):
        pass
    assert is_untouched(model)
