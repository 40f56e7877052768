"""The split of one step of SGLang's own ForwardBatch, and the batch that stays stock."""

import pytest
import torch

pytest.importorskip("sglang", reason="`make test-sglang` has it in an environment of its own")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from flexmask.integrations.sglang.step import PROMPTS, STOCK_FIELDS, step_reason
from tests.sglang.served import KEEP_ALL, Served

# request 0 decodes, 1 and 3 are long, 2 and 4 are short
CHUNKS = [(0, 500, 1), (1, 0, 200), (2, 3, 7), (3, 160, 40), (4, 300, 30)]


@pytest.fixture
def served():
    return Served(KEEP_ALL)


@pytest.mark.parametrize("mode", [mode for mode in ForwardMode if mode.name not in PROMPTS], ids=lambda mode: mode.name)
def test_other_steps_have_no_split(mode, served):
    served.engine.begin_step(served.batch(CHUNKS, ForwardMode.MIXED))
    assert served.engine.split_to_count.sparse
    served.engine.begin_step(served.batch(CHUNKS, mode))
    assert served.engine.step is served.engine.split_to_count is None


@pytest.mark.parametrize(
    ("name", "value", "dense_tokens", "reason"),
    [
        *((name, object(), 200 + 7 + 40 + 30, f"a batch has {name}") for name in STOCK_FIELDS),
        ("extend_prefix_lens_cpu", None, 278, "the host has no lengths of a batch"),
    ],
)
def test_steps_with_something_special_run_stock_and_count(name, value, dense_tokens, reason, served):
    batch = served.batch(CHUNKS, ForwardMode.MIXED, **{name: value})
    served.engine.begin_step(batch)
    assert served.engine.step is None
    split = served.engine.split_to_count
    assert (split.sparse, split.sparse_tokens, split.dense_tokens) == ((), 0, dense_tokens)
    assert step_reason(batch) == reason


def test_the_rest_of_a_step_is_a_batch_of_its_own(served):
    batch = served.batch(CHUNKS, ForwardMode.MIXED, _attn_output=torch.empty(278))
    before = dict(vars(batch))
    served.engine.begin_step(batch)
    step = served.engine.step
    # a row of decoding is neither
    assert (served.engine.split_to_count.sparse_tokens, served.engine.split_to_count.dense_tokens) == (240, 37)
    assert torch.equal(step.stock_rows, torch.tensor([0, *range(201, 208), *range(248, 278)]))
    part, wanted = step.stock_batch, served.batch(CHUNKS[::2], ForwardMode.MIXED)
    for name in vars(wanted).keys() - {"rids"}:
        made, right = getattr(part, name), getattr(wanted, name)
        assert torch.equal(made, right) if torch.is_tensor(right) else made == right
    assert getattr(part, "_attn_output", None) is None
    # the step's own batch is as it was
    assert vars(batch) == before


def test_sparse_requests_have_the_length_of_their_prompt(served):
    # of request 3 200 tokens are there: it was retracted, and prefills tokens that it had generated
    served.engine.prompt_lens_by_id.update({"1": 900, "3": 150})
    served.engine.begin_step(served.batch(CHUNKS, ForwardMode.MIXED))
    split = served.engine.step.split
    assert [(each.batch_index, each.prompt_len) for each in split.sparse] == [(1, 900), (3, 200)]


def test_one_run_of_stock_requests_is_a_view(served):
    batch = served.batch([(1, 0, 200), (2, 3, 7), (3, 0, 9)])
    served.engine.begin_step(batch)
    step = served.engine.step
    assert step.stock_rows == slice(200, 216)
    assert step.stock_batch.out_cache_loc.data_ptr() == batch.out_cache_loc[200:].data_ptr()
