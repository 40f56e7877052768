"""Tests of what engines share, in an engine of a few lines: a list of each request's keys and values is its cache."""

import logging
from itertools import accumulate
from unittest.mock import Mock

import pytest
import torch

from flexmask.integrations.serving.chunk import concat_cached
from flexmask.integrations.serving.engine import Engine
from flexmask.integrations.serving.layers import role_of_shape
from flexmask.integrations.serving.options import RequestOptions, ServingOptions
from flexmask.integrations.serving.split import StepRequests
from flexmask.settings import PrefillSettings
from tests.expected import rows_attention
from tests.serving.layers import CPU, SHAPE


class ToyEngine(Engine):
    """An engine whose layers all have the shape `SHAPE`; it keeps the keys and values of each request."""

    def __init__(self, num_layers=1, **options):
        super().__init__(ServingOptions(PrefillSettings(**options)), logging.getLogger("flexmask.tests"))
        self.roles = {number: role_of_shape(SHAPE, number, self.options.settings) for number in range(num_layers)}
        self.cache = {}

    def forward(self, chunks, requested=()):
        """Outputs of chunks, (request, query, key, value) each, in one step."""
        before = [self.cache.get(name, (None, None)) for name, *_ in chunks]
        after = [
            [x if c is None else torch.cat([c, x]) for c, x in zip(old, new[2:], strict=True)]
            for old, new in zip(before, chunks, strict=True)
        ]
        self.cache |= {name: both for (name, *_), both in zip(chunks, after, strict=True)}
        starts = [0, *accumulate(len(each[1]) for each in chunks)]
        split = self.split(StepRequests(starts, [len(key) for key, _ in after], options=requested))
        outputs = [rows_attention(each[1], *both, SHAPE.scale) for each, both in zip(chunks, after, strict=True)]
        role = self.roles[0]
        self.count_step(role, split)
        for request in split.sparse:
            _, query, *own = chunks[request.batch_index]
            cached = (None if x is None else x.transpose(0, 1) for x in before[request.batch_index])
            keys, values = (concat_cached(*parts) for parts in zip(cached, own, strict=True))
            out = torch.full_like(query, torch.nan)
            assert self.attend(role, request, query, keys, values, out=out) is out
            outputs[request.batch_index] = out
        return outputs


def chunk(name, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return (name, *(torch.randn(rows, heads, 32, generator=generator) for heads in (4, 2, 2)))


STEPS = [[chunk("a", 200, 0)], [chunk("b", 20, 1), chunk("c", 130, 2), chunk("a", 77, 3)], [chunk("a", 100, 4), chunk("c", 1, 5)]]


def far(outputs, others):
    return [float((x - y).abs().max()) for x, y in zip(outputs, others, strict=True)]


@pytest.mark.attention
def test_chunks_beside_short_prompts_and_decoding_rows():
    ours, stock = ToyEngine(gamma=1.0, block_size=32, dense_below=0), ToyEngine(dense_below=10**6)
    with torch.inference_mode():
        for step in STEPS:
            assert max(far(ours.forward(step), stock.forward(step))) < 1e-4
    assert (ours.counters.sparse_tokens, ours.counters.dense_tokens) == (200 + 130 + 77 + 100, 20)
    assert (stock.counters.sparse_tokens, stock.counters.dense_tokens) == (0, 200 + 227 + 100)
    assert ours.counters.density == pytest.approx(1)


SPARSELY = {"gamma": 0.2, "min_budget": 0, "min_coverage": 0.0, "block_size": 32, "dense_below": 0}


@pytest.mark.attention
def test_requests_have_options_of_their_own_and_heads_that_keep_little_are_named_by_layer(caplog):
    ours, stock = ToyEngine(**SPARSELY), ToyEngine(dense_below=10**6)
    ours.counters.log_to(logging.getLogger("flexmask.tests"), 60.0)
    chunks = [chunk(name, 480, 7) for name in "abc"]
    with torch.inference_mode():
        apart = far(ours.forward(chunks, [None, RequestOptions(gamma=1.0), RequestOptions(dense=True)]), stock.forward(chunks))
    assert apart[0] > 0.05 and max(apart[1:]) < 1e-4
    assert ours.counters.dense_tokens == 480
    ours.counters.log()
    assert "flexmask: heads that keep less than 25% of some rows' attention: layer 0 head " in caplog.text


def test_a_step_with_a_reason_runs_stock_and_says_so_once(caplog):
    ours = ToyEngine(dense_below=0)
    ours.counters.warn_once("nobody listens yet")
    ours.counters.log_to(logging.getLogger("flexmask.tests"), 60.0)
    for reason in ("a step is odd", "it is even", "a step is odd"):
        split = ours.split(StepRequests([0, 300], [300]), reason)
        assert (split.sparse, split.dense_tokens) == ((), 300)
    assert caplog.messages == [
        f"flexmask: the engine's own attention runs: {reason}" for reason in ("a step is odd", "it is even")
    ]


def test_the_first_sparse_layer_counts_for_all():
    ours = ToyEngine(num_layers=3, dense_below=0, dense_layers=[0])
    split = ours.split(StepRequests([0, 300], [300]))
    for role in ours.sparse_layers:
        ours.count_step(role, split)
    assert (ours.counters.sparse_steps, ours.counters.sparse_tokens) == (1, 300)


def started(largest, num_layers=3, **options):
    """An engine of layers, the first of them dense."""
    ours = ToyEngine(num_layers, dense_layers=[0], **options)
    with torch.inference_mode():
        ours.start(largest, CPU, torch.float32, "STOCK")
    return ours


@pytest.mark.attention
def test_start_logs_the_roles_and_compiles(caplog):
    caplog.set_level("INFO", "flexmask.tests")
    started((130, 400), **SPARSELY, layers={1: {"gamma": 0.3}})
    roles, compiled = (record.getMessage() for record in caplog.records if record.name == "flexmask.tests")
    method = "(hybrid, gamma 0.2 to 0.3 by layer or head, min_budget 0, min_coverage 0.0)"
    from_where = "from 0 tokens on, in chunks of at least 32 rows, "
    assert roles.startswith(f"flexmask: 2 of 3 attention layers prefill sparse {method} {from_where}")
    assert roles.endswith(
        "; STOCK runs the other rows and layers. Settings: defaults. Layers left to it: 1 layer (in dense_layers)."
    )
    assert compiled.startswith("flexmask: kernels compiled in ")


@pytest.mark.parametrize(
    ("is_first", "exports", "dense_layers"), [(True, True, []), (True, False, []), (False, True, []), (True, True, [0])]
)
def test_the_first_rank_exports_its_counters_if_its_stage_does_and_a_layer_runs_sparse(
    is_first, exports, dense_layers, monkeypatch
):
    monkeypatch.setattr("flexmask.integrations.serving.engine.warm_up", lambda *_: 0.0)
    ours = ToyEngine(dense_below=0, dense_layers=dense_layers)
    ours.counters.export = Mock()
    ours.start((130, 400), CPU, torch.float32, "STOCK", is_first=is_first, exports=exports)
    assert ours.counters.export.called == (is_first and exports and not dense_layers)


@pytest.mark.parametrize(
    ("num_layers", "largest", "options", "told"),
    [
        (0, (512, 8192), {}, "flexmask: no attention layers found in this model; STOCK runs it. Settings: defaults."),
        (3, (1024, 32768), {"dense_below": 10**6}, "2 layers (the largest call: 32768 tokens < dense_below 1000000)"),
        (3, (512, 20000), {}, "2 layers (the largest call: 512 rows < 1024)"),
    ],
)
def test_nothing_is_compiled_without_layers_or_if_the_largest_call_is_dense(num_layers, largest, options, told, caplog):
    caplog.set_level("INFO")
    assert started(largest, num_layers, **options).sparse_layers == []
    assert told in caplog.text and len(caplog.messages) == 1
