"""Selections whose launches are captured in one layer and replayed in others: each as by itself."""

import functools
import weakref
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from flexmask.base.inputs import attention_inputs
from flexmask.base.selection import BlockLists
from flexmask.integrations.serving.chunk import SparseRequest, attend_chunk
from flexmask.integrations.serving.layers import LayerShape, role_of_shape
from flexmask.kernels import launch, replay
from flexmask.selection.prepare import prepare_selection, with_replay
from flexmask.selection.select import select_blocks
from flexmask.settings import PrefillSettings
from tests.cases import Case, Config, by_kernels, structured_inputs
from tests.comparisons import assert_equal_lists
from tests.kernels.launches import OnGPU
from tests.kernels.launches import launched as launched

# that drop blocks of short prompts
HYBRID = {"method": "hybrid", "block_size": 16, "gamma": 0.97, "min_budget": 16, "min_coverage": 0.0, "last_rows_dense": False}
HEADS = (0.96, 0.98)


@pytest.fixture
def replayed(monkeypatch):
    """An entry for each selection that is replayed."""
    found, right = [], replay._replay
    monkeypatch.setattr(replay, "_replay", lambda *given: found.append(right(*given)) or found[-1])
    return found


def layers_of(config, scores, lengths, device="cpu"):
    """Cases of one geometry: the query and key of three layers."""
    generator = torch.Generator().manual_seed(1)
    made = (structured_inputs(generator, 1, 2, 1, *lengths, 16) for _ in range(3))
    return [Case(query.to(device), key.to(device), config, scores) for query, key in made]


def by_itself(case):
    """By plain steps on a CPU, if it is asked outside of `by_kernels`."""
    inputs = attention_inputs(case.query, case.key, **case.keywords()).with_offset()
    return select_blocks(prepare_selection(case.config.checked_method.for_inputs(inputs), inputs), inputs)


def prepared_for(case):
    inputs = attention_inputs(case.query, case.key, **case.keywords()).with_offset()
    prepared = with_replay(prepare_selection(case.config.checked_method.for_inputs(inputs), inputs))
    return prepared, lambda case: select_blocks(prepared, inputs.with_fields(query=case.query, key=case.key))


CALLS = [
    (HYBRID, {}, (120, 120)),
    (HYBRID, {"softcap": 5.0, "window": 90}, (40, 150)),
    ({**HYBRID, "gamma": HEADS, "row_stride": 4, "min_coverage": 0.3}, {"scale": 0.9}, (65, 130)),
    ({**HYBRID, "last_rows_dense": True}, {}, (63, 129)),
    ({"method": "flexprefill", "block_size": 16, "gamma": 0.8, "min_budget": 16, "tau": 0.3}, {}, (65, 129)),
]


def differ(selections):
    return not any(
        all(map(torch.equal, one.lists, other.lists)) for number, one in enumerate(selections) for other in selections[:number]
    )


def assert_each_as(expected, layers):
    assert differ(expected)
    prepared, selected = prepared_for(layers[0])
    for case, wanted in zip((*layers, layers[0]), (*expected, expected[0]), strict=True):
        assert_equal_lists(selected(case), wanted)
    return None if prepared.replay is None else prepared.replay._captured


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels run there")
@pytest.mark.parametrize(("options", "scores", "lengths"), CALLS)
def test_every_layer_selects_as_by_itself(options, scores, lengths, replayed):
    layers = layers_of(Config(**options), scores, lengths)
    expected = list(map(by_itself, layers))
    with by_kernels():
        captured = assert_each_as(expected, layers)
    only_launches = options["method"] == "hybrid"
    assert (captured is not None, len(replayed)) == (only_launches, 2 * only_launches)


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "scores", "lengths"), CALLS)
def test_every_layer_selects_as_by_itself_on_a_gpu(options, scores, lengths, cuda):
    for dtype in (torch.float32, torch.bfloat16):
        layers = layers_of(Config(**options), scores, lengths, device=cuda)
        layers = [replace(case, query=case.query.to(dtype), key=case.key.to(dtype)) for case in layers]
        captured = assert_each_as(list(map(by_itself, layers)), layers)
        assert captured is None or captured.all_compiled == launch.Kernel(launch.soft_capped.fn).launched_directly


def test_replayed_lists_stay_while_the_tensors_of_layers_are_freed():
    layers = layers_of(Config(**HYBRID), {}, (40, 97))
    expected = list(map(by_itself, layers))
    with by_kernels():
        _, selected = prepared_for(layers[0])
        assert differ(expected)
        for found, wanted in zip(list(map(selected, layers)), expected, strict=True):
            assert_equal_lists(found, wanted)
    # the query and key of the layer that was captured too; those that the plan was made with are the first's
    alive = [weakref.ref(x.untyped_storage()) for case in layers[1:] for x in (case.query, case.key)]
    del layers
    assert [each() for each in alive] == [None] * len(alive)


def test_compiled_launchers_get_each_layer_s_addresses(launched):
    run, launches = launched
    constant, memory = torch.zeros(8).as_subclass(OnGPU), []

    def select(query, key):
        lists = BlockLists(*(query.new_empty(8, dtype=torch.int32) for _ in range(4)))
        between = query.new_empty(8)
        memory.append(weakref.ref(between.untyped_storage()))
        run[(7,)](query[8:], between, 16, 2, 1, CONSTANT=3, num_warps=1)
        run[(7, 3)](between[4:], lists.kv_indices, 16, 2, 1, CONSTANT=4, num_warps=1)
        run[(5,)](constant, lists.full_kv_indices[4:], 16, 2, 1, CONSTANT=4, num_warps=1)
        run[(5,)](key, between, 32, 2, 1, CONSTANT=3, num_warps=1)
        return lists

    launches_of, inputs = replay.LaunchReplay(), attention_inputs(torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8, 16))
    for _ in range(4):
        query, key = (torch.zeros(64).as_subclass(OnGPU) for _ in range(2))
        launches.ran.clear()
        lists = launches_of.lists(inputs.with_fields(query=query, key=key), functools.partial(select, query, key))
    assert len(memory) == 2 and memory[1]() is None
    there, calls = (1, "stream 0", "function", "metadata", None, None, None), [call for _, call in launches.ran]
    between = calls[0][10]
    assert calls == [
        (7, 1, *there, query.data_ptr() + 32, between, 16, 2, 1, 3),
        (7, 3, *there, between + 16, lists.kv_indices.data_ptr(), 16, 2, 1, 4),
        (5, 1, *there, constant.data_ptr(), lists.full_kv_indices.data_ptr() + 16, 16, 2, 1, 4),
        (5, 1, *there, key.data_ptr(), between, 32, 2, 1, 3),
    ]
    assert between not in {x.data_ptr() for x in (query, key, constant, *lists)}


def test_other_strides_and_addresses_select_as_usual(replayed):
    layers = layers_of(Config(**HYBRID), {}, (40, 97))
    wider = torch.zeros(1, 2, 40, 24)
    wider[..., :16] = layers[1].query
    moved = torch.zeros(layers[2].key.numel() + 1)[1:].view_as(layers[2].key).copy_(layers[2].key)
    others = [replace(layers[1], query=wider[..., :16]), replace(layers[2], key=moved)]
    expected = list(map(by_itself, others))
    with by_kernels():
        _, selected = prepared_for(layers[0])
        for _ in range(2):
            selected(layers[0])
        for case, wanted in zip(others, expected, strict=True):
            assert_equal_lists(selected(case), wanted)
    assert not replayed


MORE = {
    "changed": lambda lists, query: lists.kv_num_blocks.clamp_(max=2),
    "copied": lambda lists, query: query.mT.contiguous(),
    "reshaped": lambda lists, query: query.mT.flatten(),
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_method_that_does_more_than_launch_is_not_replayed(more, mode, monkeypatch):
    layers = layers_of(Config(**HYBRID), {}, (40, 97))
    with by_kernels(), mode():
        prepared, selected = prepared_for(layers[0])
        select = type(prepared.method_for_steps).select

        def and_more(self, problem):
            choice = select(self, problem)
            more(choice.lists, problem.inputs.query)
            return choice

        monkeypatch.setattr(type(prepared.method_for_steps), "select", and_more)
        for case in layers:
            selected(case)
    assert prepared.replay._captured is None


def test_statistics_and_profilers_see_whole_selections(replayed, monkeypatch):
    layers = layers_of(Config(**HYBRID), {}, (40, 97))
    with by_kernels():
        prepared, selected = prepared_for(layers[0])
        for _ in range(2):
            selected(layers[0])
        inputs = attention_inputs(layers[1].query, layers[1].key).with_offset()
        assert "density" in select_blocks(prepared, inputs, statistics=("density",)).stats
        monkeypatch.setattr(replay, "has_launch_hooks", lambda: True)
        selected(layers[1])
    assert prepared.replay._captured is not None and not replayed


@pytest.mark.attention
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels run there")
def test_layers_of_a_chunk_replay_the_launches_of_the_second(replayed):
    shape = LayerShape(num_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=32, scale=0.2)
    options = {**HYBRID, "block_size": 32, "min_budget": 32}
    layer = role_of_shape(shape, 0, PrefillSettings(**options))
    request = SparseRequest(0, 0, 70, 165)
    kept, generator = [], torch.Generator().manual_seed(1)
    for number in range(4):
        query, key = structured_inputs(generator, 1, 4, 2, 70, 165, 32)
        given = query[0].transpose(0, 1), key[0], torch.randn(2, 165, 32)
        with torch.inference_mode():
            alone = attend_chunk(layer, *given, with_counts=True)
            with by_kernels():
                ours = attend_chunk(layer, *given, request=request, with_counts=True)
        assert torch.equal(ours.out, alone.out) and all(map(torch.equal, ours.counts, alone.counts))
        assert len(replayed) == max(0, number - 1)
        kept.append(int(sum(map(torch.sum, ours.counts))))
    assert len(set(kept)) == 4
