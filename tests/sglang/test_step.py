"""The plan of one step, the batch that stays stock, and slots in the cache."""

import logging
from types import SimpleNamespace

import pytest
import torch

from flexmask.integrations.serving.engine import Engine
from flexmask.integrations.serving.options import ServingOptions
from flexmask.integrations.sglang.engine import SGLangEngine
from flexmask.integrations.sglang.step import STOCK_FIELDS, step_reason
from flexmask.settings import PrefillSettings

SETTINGS = PrefillSettings(dense_below=100, block_size=32)
# request 0 decodes, 1 and 3 are long, 2 and 4 are short
ROWS, BEFORE = [1, 200, 7, 40, 30], [500, 0, 3, 160, 300]


def batch_of(rows=ROWS, before=BEFORE, mode="MIXED", **others):
    starts = torch.tensor(rows).cumsum(0) - torch.tensor(rows)
    total = sum(rows)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        batch_size=len(rows),
        extend_seq_lens_cpu=list(rows),
        extend_prefix_lens_cpu=list(before),
        extend_logprob_start_lens_cpu=[0] * len(rows),
        req_pool_indices=torch.arange(len(rows)) + 3,
        seq_lens=torch.tensor(rows) + torch.tensor(before),
        seq_lens_cpu=torch.tensor(rows) + torch.tensor(before),
        orig_seq_lens=None,
        seq_lens_sum=total + sum(before),
        extend_seq_lens=torch.tensor(rows, dtype=torch.int32),
        extend_prefix_lens=torch.tensor(before, dtype=torch.int32),
        extend_start_loc=starts.int(),
        extend_num_tokens=total,
        input_ids=torch.arange(total),
        positions=torch.arange(total) + 1000,
        out_cache_loc=torch.arange(total) + 2000,
        rids=[f"request {each}" for each in range(len(rows))],
        **{name: None for name in STOCK_FIELDS if name not in others},
        **others,
    )


class Model(SGLangEngine):
    """A model without layers."""

    def __init__(self):
        Engine.__init__(self, ServingOptions(SETTINGS, least_rows=32), logging.getLogger("tests"))
        self.requested, self.req_to_token = {}, torch.zeros(8, 1024, dtype=torch.int32)
        self._translator = self._held = None


def plan_of(batch):
    model = Model()
    model.step(batch)
    return model.planned


@pytest.mark.parametrize("mode", ["DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "SPLIT_PREFILL", "DLLM_EXTEND"])
def test_other_steps_have_no_plan(mode):
    assert plan_of(batch_of(mode=mode)) is None


@pytest.mark.parametrize(
    ("name", "value", "dense_tokens", "reason"),
    [
        *((name, object(), 200 + 7 + 40 + 30, f"a batch has {name}") for name in STOCK_FIELDS),
        ("extend_prefix_lens_cpu", None, 278, "the host has no lengths of a batch"),
    ],
)
def test_steps_with_something_special_run_stock_and_count(name, value, dense_tokens, reason):
    batch = batch_of()
    assert step_reason(batch) is None
    setattr(batch, name, value)
    plan = plan_of(batch)
    assert (plan.sparse, plan.sparse_tokens, plan.dense_tokens) == ((), 0, dense_tokens)
    assert step_reason(batch) == reason


def test_the_rest_of_a_step_is_a_batch_of_its_own():
    batch = batch_of()
    batch._attn_output = torch.empty(278)
    model = Model()
    step = model.step(batch)
    # a row of decoding is neither
    assert (model.planned.sparse_tokens, model.planned.dense_tokens) == (240, 37)
    rows = torch.tensor([0, *range(201, 208), *range(248, 278)])
    assert torch.equal(step.stock_rows, rows)
    part, wanted = step.stock_batch, batch_of([1, 7, 30], [500, 3, 300])
    assert part.req_pool_indices.tolist() == [3, 5, 7]
    for name in ("batch_size", "seq_lens_sum", "extend_num_tokens", "extend_seq_lens_cpu", "extend_prefix_lens_cpu"):
        assert getattr(part, name) == getattr(wanted, name)
    for name in ("seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc"):
        torch.testing.assert_close(getattr(part, name), getattr(wanted, name))
    for name in ("input_ids", "positions", "out_cache_loc"):
        assert torch.equal(getattr(part, name), getattr(batch, name)[rows])
    assert not hasattr(part, "_attn_output")
    # the step's own batch is as it was
    assert (batch.batch_size, batch.extend_seq_lens_cpu, hasattr(batch, "_attn_output")) == (5, ROWS, True)


def test_one_run_of_stock_requests_is_a_view():
    batch = batch_of([200, 7, 9], [0, 3, 0])
    step = Model().step(batch)
    assert step.stock_rows == slice(200, 216)
    assert step.stock_batch.out_cache_loc.data_ptr() == batch.out_cache_loc[200:].data_ptr()
