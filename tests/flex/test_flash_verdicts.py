"""A verdict on FLASH per kind of call and device: when it is checked, kept, and not to be had."""

import itertools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexmask.base.inputs import AttentionInputs
from flexmask.flex.flash_check import FlashCall, Verdict, flash_verdict
from tests.compile_support import fresh_compiler as fresh_compiler
from tests.held_open import HELD, held_open

CPU = torch.device("cpu")
_sizes = itertools.count(10_001)


@pytest.fixture
def call():
    """A kind that no other test has."""
    return FlashCall(torch.bfloat16, next(_sizes), 64)


def refuses(call, device):
    raise AssertionError("a check ran")


@pytest.mark.parametrize("field", FlashCall._fields)
def test_each_kind_is_checked_once(call, field):
    check = Mock(return_value=Verdict(lse_factor=1.5))
    other = call._replace(**{field: torch.float16 if field == "dtype" else next(_sizes)})
    for kind in (call, other):
        assert flash_verdict(kind, CPU, check) == check.return_value
        assert flash_verdict(kind, CPU, refuses) == check.return_value
    assert check.mock_calls == [mock.call(call, CPU), mock.call(other, CPU)]


def test_threads_wait_for_one_check(call):
    checked = []

    def slow(call, device):
        checked.append(call)
        time.sleep(0.05)
        return Verdict()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: flash_verdict(call, CPU, slow), range(4)))
    assert (len(checked), found) == (1, [Verdict()] * 4)


def test_an_error_of_the_check_is_passed_on_and_not_kept(call):
    def out_of_memory(call, device):
        raise torch.OutOfMemoryError("none left")

    with pytest.raises(torch.OutOfMemoryError):
        flash_verdict(call, CPU, out_of_memory)
    assert flash_verdict(call, CPU, Mock(return_value=Verdict())) == Verdict()


@pytest.mark.parametrize(
    "state", [FakeTensorMode, lambda: held_open(HELD["torch.export"])], ids=["a dispatch mode", "another thread exports"]
)
def test_no_check_runs_where_it_cannot(call, state):
    with state():
        assert flash_verdict(call, CPU, refuses) is None
    assert flash_verdict(call, CPU, Mock(return_value=Verdict())) == Verdict()
    with state():
        assert flash_verdict(call, CPU, refuses) == Verdict()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "known", [None, Verdict(), Verdict(lse_factor=1 / 0.7, lse_reason="words of its own"), Verdict("it raised: no")]
)
def test_no_check_runs_while_torch_compile_traces(call, known, dynamic):
    if known is not None:
        flash_verdict(call._replace(captures=True), CPU, Mock(return_value=known))
    x = torch.zeros(1, 2, 3, call.head_dim, dtype=torch.bfloat16)
    # an offset if there are more keys than rows
    key, value = torch.zeros(1, 2, 7, call.head_dim), torch.zeros(1, 2, 7, 64)

    @torch.compile(fullgraph=True, backend="eager", dynamic=dynamic)
    def traced(x):
        found = flash_verdict(FlashCall.of(AttentionInputs(x, key, value, 1.0), 128, False), CPU, refuses)
        if found is None:
            return x - 1
        if found.reason != "":
            return x - 2
        return x + found.lse_factor + (10 if found.lse_reason else 0)

    expected = -1 if known is None else -2 if known.reason else known.lse_factor + (10 if known.lse_reason else 0)
    torch.testing.assert_close(traced(x), torch.full_like(x, expected))


def test_what_was_missed_is_said_once(call, caplog):
    with caplog.at_level(logging.WARNING, "flexmask"), FakeTensorMode():
        flash_verdict(call, CPU, refuses)
        flash_verdict(call, CPU, refuses)
    assert [each.getMessage() for each in caplog.records] == [
        f"flexmask: FLASH was not checked before such calls ({call}) were compiled or captured, where no check can run, and does "
        "not serve them: make one before, or flexmask.warmup"
    ]


@pytest.mark.parametrize(
    ("verdict", "level", "said"),
    [
        (Verdict(seconds=2.34), logging.INFO, "right"),
        (Verdict(lse_reason="no log-sum-exp"), logging.INFO, "no log-sum-exp"),
        (Verdict("its check here found block lists ignored"), logging.WARNING, "its check here found block lists ignored"),
    ],
)
def test_a_check_is_logged_with_its_time(call, caplog, verdict, level, said):
    with caplog.at_level(logging.INFO, "flexmask"):
        flash_verdict(call, CPU, Mock(return_value=verdict))
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage() == f"flexmask: FLASH was checked on cpu ({call}) in {verdict.seconds:.1f} s: {said}"


@pytest.mark.gpu
def test_no_check_runs_while_a_cuda_graph_is_captured(cuda, call):
    device, x = torch.device("cuda", torch.cuda.current_device()), torch.zeros(1, device=cuda)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        assert flash_verdict(call, device, refuses) is None
    flash_verdict(call, device, Mock(return_value=Verdict()))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        assert flash_verdict(call, device, refuses) == Verdict()
