"""What other threads compile or export reaches no model of this one."""

import pytest
import torch

import flexmask.integrations.huggingface as flexmask_hf
from tests.held_open import HELD, held_open
from tests.integrations.common import make_model, padded
from tests.integrations.test_packed import arguments

# a selection that rounding does not change: torch may take another of its compiled versions
SPARSE = {"method": "streaming_llm", "block_size": 32, "sink_blocks": 1, "window_blocks": 2, "dense_below": 100}
FORMS = {
    "a prompt": lambda tokens: {},
    "padded": lambda tokens: {"attention_mask": padded(tokens)},
    "no cache": lambda tokens: {"use_cache": False},
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


def assert_same(found, expected):
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, atol=1e-5, rtol=0, msg=name)


@pytest.mark.attention
@pytest.mark.parametrize("work", HELD.values(), ids=HELD)
def test_every_call_of_a_model_runs_while_another_thread_compiles(served, tokens, work):
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
    with held_open(work):
        found = results()
    for got, wanted in zip(found, expected, strict=True):
        assert_same(got, wanted)
