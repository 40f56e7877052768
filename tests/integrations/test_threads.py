"""Models in a block while other threads compile or export, and models of fake tensors, which give shapes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flexmask.integrations.huggingface as flexmask_hf
from tests.held_open import HELD, held_open
from tests.integrations import common
from tests.integrations.common import make_model, padded
from tests.integrations.test_packed import arguments

# a selection that rounding does not change: torch may take another of its compiled versions
SPARSE = {"method": "streaming_llm", "block_size": 32, "sink_blocks": 1, "window_blocks": 2, "dense_below": 100}
WHOLE = {
    "a prompt": lambda tokens: {},
    "padded": lambda tokens: {"attention_mask": padded(tokens)},
    "no cache": lambda tokens: {"use_cache": False},
    "no cache, positions": lambda tokens: {"use_cache": False, "position_ids": torch.arange(tokens.shape[1])[None]},
}
FORMS = {
    **WHOLE,
    "packed by positions": lambda tokens: arguments("positions"),
    "packed by bounds": lambda tokens: arguments("bounds"),
}


@pytest.fixture(scope="module")
def served():
    return make_model()


def logits(model, tokens, options):
    """In a block each: of every form of call, and tokens that were generated."""
    found = {}
    for name, form in FORMS.items():
        # of one row, which is one kernel less
        prompt = tokens if name == "padded" else tokens[:1]
        with flexmask_hf.sparse_prefill(model, **options):
            found[name] = model(prompt, **form(prompt)).logits
    with flexmask_hf.sparse_prefill(model, **options):
        found["generate"] = model.generate(tokens[:1], max_new_tokens=3, do_sample=False)
    return found


# what tests/test_modes.py runs below the model, as it does the others
SLOW = ("a backend compiles", "flexmask compiles")


@pytest.mark.attention
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in HELD])
def test_every_call_of_a_model_runs_while_another_thread_compiles(served, tokens, name):
    # torch.export patches modules in all threads: torch.compile then meets torch's logging, which other tests may have compiled
    torch.compiler.reset()
    compiled = torch.compile(served, backend="eager")
    both = {"attention_mask": torch.ones_like(tokens[:1])}

    def results():
        found = [logits(served, tokens, options) for options in ({}, SPARSE)]
        with flexmask_hf.sparse_prefill(served, **SPARSE):
            found.append({"compiled": compiled(tokens[:1], **both).logits})
        report = flexmask_hf.inspect_prefill(served, tokens[:1], **SPARSE)
        found.append({"inspected": torch.tensor([report.run.stats[layer][0].density.mean() for layer in (0, 1)])})
        return found

    for _ in range(2):
        expected = results()
    with held_open(HELD[name]):
        found = results()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.fixture(params=["Llama", "Mistral"])
def fake(request, tokens):
    """A mode, and a model of its tensors."""
    mode = FakeTensorMode()
    with mode:
        return mode, make_model(request.param)


@pytest.mark.attention
@pytest.mark.parametrize("options", [{}, common.SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("form", WHOLE)
def test_a_model_gives_the_shapes_that_it_gives_without_a_block(fake, tokens, form, options):
    mode, model = fake
    given = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in WHOLE[form](tokens).items()}
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
    with mode, pytest.raises(ValueError, match=r"inspect_prefill needs a model with values; got one of fake tensors"):
        flexmask_hf.inspect_prefill(model, prompt)
