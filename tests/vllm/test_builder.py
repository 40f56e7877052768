"""The builder around a written-out stock backend: the splits of steps, and which steps run stock."""

import logging

import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")

from flexmask.integrations.serving.layers import SparseLayer, Stock
from tests.vllm.stock_steps import LAYER, MIXES, StockBuilder, assert_stock_outputs, step_of


def test_drafts_graphs_wrappers_and_stock_layers_are_not_split(parts, config, engine, caplog):
    builder, _ = parts
    common, _ = step_of(MIXES["one whole prompt"])
    for build in (builder.build_for_cudagraph_capture, lambda given: builder.build_for_drafting(given, 0)):
        assert not hasattr(build(common), "flexmask_step")
        assert hasattr(builder.build(0, common), "flexmask_step")
    engine.counters.log_to(logging.getLogger("vllm.tests"), 60.0)
    derived = type("Derived", (type(builder),), {})(None, [LAYER.layer_name], config, torch.device("cpu"))
    assert not hasattr(derived.build(0, common), "flexmask_step")
    rewritten = "Derived rewrites the batch, as for chunked local attention, so layers do not see the scheduler's requests"
    assert caplog.messages == [f"flexmask: the engine's own attention runs: {rewritten}"]
    engine.roles["stock"] = Stock("in dense_layers")
    of_stock_layers = type(builder)(None, ["stock"], config, torch.device("cpu"))
    assert not hasattr(of_stock_layers.build(0, common), "flexmask_step")
    verifying = common.replace(is_prefilling=torch.tensor([False]))
    assert builder.build(0, verifying).flexmask_step.split.sparse == ()


@pytest.mark.parametrize(
    ("change", "scale", "reason"),
    [
        ({"causal": False}, 0.2, "attention of a step is not causal"),
        ({"seq_lens_cpu_upper_bound": None}, 0.2, "the host has no lengths of a step"),
        ({"mm_req_doc_ranges": {0: [(3, 9)]}}, 0.2, "a step has images that see later tokens"),
        # set in every forward of vLLM's Transformers backend
        ({}, 1.0, "a layer made with scale 0.2 has scale 1"),
    ],
)
def test_steps_that_run_stock_count_as_dense_and_say_why(change, scale, reason, parts, engine, caplog):
    builder, impl = parts
    impl.scale = scale
    engine.counters.log_to(logging.getLogger("vllm.tests"), 60.0)
    common, tensors = step_of(MIXES["sparse ones between dense ones"])
    for _ in range(2):
        assert_stock_outputs(parts, common.replace(**change), tensors)
    assert (engine.counters.sparse_steps, engine.counters.sparse_tokens, engine.counters.dense_tokens) == (0, 0, 2 * 153)
    assert caplog.messages == [f"flexmask: the engine's own attention runs: {reason}"]
    # models that take images name each request's images
    assert builder.build(0, common.replace(mm_req_doc_ranges={0: []})).flexmask_step.split.sparse


# a batch padded for a CUDA graph has no rows of its last request, and vLLM 0.33 no entry either
@pytest.mark.parametrize("is_prefilling", [None, (True, False, True, False, False), (True, False, True, False)])
def test_a_step_of_short_rows_is_counted_without_a_list_of_requests(is_prefilling, parts, engine, monkeypatch):
    builder, _ = parts
    common, _ = step_of([(1, 40), (5, 60), (7, 33), (1, 9), (0, 0)])
    if is_prefilling is not None:
        common = common.replace(is_prefilling=torch.tensor(is_prefilling))
    builder.flexmask.policy = builder.flexmask.policy._replace(min_rows=7)
    by_request = builder.build(0, common).flexmask_step.split
    assert by_request.sparse
    builder.flexmask.policy = builder.flexmask.policy._replace(min_rows=8)
    monkeypatch.setattr(engine, "split", None)
    split = builder.build(0, common).flexmask_step.split
    assert split.sparse == () and split.dense_tokens == by_request.sparse_tokens + by_request.dense_tokens


def test_chunks_that_a_latent_backend_decodes_are_not_split_off(config, engine):
    """Also where the server's `min_rows` is lower; the policy of other layers stays."""
    from flexmask.integrations.vllm.builder import SparseLatentBuilder

    class Decodes512(StockBuilder):
        reorder_batch_threshold = 512

    made = type("Builder", (SparseLatentBuilder, Decodes512), {})
    made.flexmask_own = made
    engine.roles[LAYER.layer_name] = SparseLayer.__new__(SparseLayer)
    builder = made(None, [LAYER.layer_name], config, torch.device("cpu"))
    assert builder.flexmask.policy.min_rows == 513 > engine.options.policy.min_rows
