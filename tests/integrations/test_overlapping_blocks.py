"""Blocks on one model that overlap: in one thread, in several, and in asyncio tasks."""

import asyncio
import copy
import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.context_manager import opened_scope
from flexmask.integrations.record import PrefillRun
from tests.integrations.common import is_open, is_untouched

# all dense: the reason of a call shows whose options it ran with
BELOW = (1000, 2000, 3000)


def block(model, number, **options):
    return flexmask_hf.sparse_prefill(model, dense_below=BELOW[number], **options)


def ran_in(run):
    return [BELOW.index(int(reason.rsplit(" ", 1)[1])) for reason in run.reasons.get(0, [])]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_are_closed_in_any_order(model, tokens, order):
    """A call belongs to the block entered last of those still open."""
    blocks = [block(model, number) for number in range(3)]
    runs = [each.__enter__() for each in blocks]
    expected = [[], [], []]
    still_open = {0, 1, 2}
    for number in order:
        model(tokens[:, :50])
        expected[max(still_open)].append(max(still_open))
        blocks[number].__exit__(None, None, None)
        still_open.remove(number)
        assert is_open(model) == bool(still_open)
    assert [ran_in(run) for run in runs] == expected
    assert all(each._manual_scopes == [] for each in blocks)
    assert is_untouched(model)


def test_same_object_is_entered_again_and_while_it_is_open(model, tokens):
    one = block(model, 0)
    with one as first:
        model(tokens[:, :50])
        with one as inner:
            model(tokens[:, :50])
            model(tokens[:, :50])
        model(tokens[:, :50])
    assert is_untouched(model)
    with one as second:
        model(tokens[:, :50])
    assert [len(run.stats[0]) for run in (first, inner, second)] == [2, 2, 1]
    assert is_untouched(model)


@pytest.mark.parametrize("shares_object", [False, True])
def test_threads_run_with_their_own_blocks(model, tokens, shares_object):
    """A enters, B enters, both run, A leaves, B runs on."""
    steps = threading.Barrier(2, timeout=120)
    shared = block(model, 0)
    runs = {}

    def work(number):
        if number == 1:
            steps.wait()  # the other has entered
        with shared if shares_object else block(model, number) as run:
            runs[number] = run
            if number == 0:
                steps.wait()
            steps.wait()  # both are open
            for _ in range(20):
                model(tokens[:, :50])
            if number == 1:
                steps.wait()  # the other has left
                model(tokens[:, :50])
        if number == 0:
            steps.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(torch.no_grad()(work), range(2)))
    assert [ran_in(runs[number]) for number in (0, 1)] == [[0] * 20, [0 if shares_object else 1] * 21]
    assert is_untouched(model)


def test_models_that_share_a_config_have_blocks_of_their_own(model, tokens):
    other = LlamaForCausalLM(model.config).eval()
    first, second = block(model, 0), block(other, 1)
    runs = [first.__enter__(), second.__enter__()]
    for each in (model, other):
        each(tokens[:, :50])
    first.__exit__(None, None, None)
    other(tokens[:, :50])
    second.__exit__(None, None, None)
    assert [ran_in(run) for run in runs] == [[0], [1, 1]]
    assert is_untouched(model) and is_untouched(other)


def test_a_block_serves_modules_with_the_model_s_config_that_have_none(model, tokens):
    """Another model, compiled or not, and copies of modules, as torch.nn.DataParallel's."""
    other = LlamaForCausalLM(model.config).eval()
    attention = copy.copy(other.model.layers[0].self_attn)
    others = [other, torch.compile(other, backend="eager"), other]
    for number, each in enumerate(others):
        if number == 2:
            other.model.layers[0].self_attn = attention
        with block(model, 0) as run:
            each(tokens[:, :50])
        assert ran_in(run) == [0]
    assert is_untouched(model)


def test_a_block_holds_no_module_that_others_have_let_go(model):
    """torch.nn.DataParallel runs new copies of the modules in each forward."""
    with opened_scope(model, PrefillRun()) as scope:
        replica = copy.copy(model.model.layers[0].self_attn)
        del replica.layer_idx
        assert scope.layer_of(replica) == 0
        gone = weakref.ref(replica)
        del replica
        gc.collect()
        assert gone() is None


def test_a_block_on_a_part_serves_the_part_inside_one_on_the_model(model, tokens):
    with block(model, 0) as outer, block(model.model, 1) as inner:
        model(tokens[:, :50])
    assert (ran_in(outer), ran_in(inner)) == ([], [1])
    assert is_untouched(model)


def test_tasks_run_with_their_own_blocks(model, tokens):
    """Two requests of one server; what a task starts belongs to its block."""

    async def request(number, entered, may_leave):
        with block(model, number) as run:
            entered.set()
            await may_leave.wait()
            model(tokens[:, :50])
            await asyncio.to_thread(torch.no_grad()(model), tokens[:, :50])
            await asyncio.create_task(call())
        return ran_in(run)

    async def call():
        model(tokens[:, :50])

    async def serve():
        entered, may_leave = ([asyncio.Event(), asyncio.Event()] for _ in range(2))
        first = asyncio.create_task(request(0, entered[0], may_leave[0]))
        await entered[0].wait()
        second = asyncio.create_task(request(1, entered[1], may_leave[1]))
        await entered[1].wait()
        may_leave[0].set()
        results = [await first]
        assert is_open(model)
        may_leave[1].set()
        return [*results, await second]

    assert asyncio.run(serve()) == [[0, 0, 0], [1, 1, 1]]
    assert is_untouched(model)


def test_block_that_cannot_be_entered_leaves_the_others_open(model, tokens):
    with block(model, 0) as run:
        model.base_model.register_forward_hook = lambda *given, **named: 1 / 0
        with pytest.raises(ZeroDivisionError) as caught, block(model, 1):
            pytest.fail("entered")
        del model.base_model.register_forward_hook
        model(tokens[:, :50])
    assert caught.traceback  # it holds what was not entered
    assert ran_in(run) == [0]
    assert is_untouched(model)
