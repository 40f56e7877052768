"""Changing states of the program use up no recompilations; TF32 is off where the project needs it, and put back."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from flexmask import sparse_attention
from flexmask.precision import without_tf32
from tests.compile_support import counting as counting
from tests.compile_support import cut, default_dtype, recompilations, set_to
from tests.interrupts import in_another_thread, interrupted

STATES = {
    "as it is": contextlib.nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    **{f"{dtype} by default": partial(default_dtype, dtype) for dtype in (torch.bfloat16, torch.float64, torch.float16)},
    "meta by default": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another autocast": lambda: torch.autocast("cpu", torch.float16),
    "autocast of another device": lambda: set_to(
        True, lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on)
    ),
    "cpu by default": lambda: torch.device("cpu"),
    **{f"{n} threads": partial(set_to, n, torch.get_num_threads, torch.set_num_threads) for n in (2, 3, 4, 5)},
    "deterministic": lambda: set_to(True, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
}


@pytest.mark.attention
def test_alternating_states_use_up_no_recompilations(counting):
    before, inputs = torch.get_num_threads(), cut(100)
    with torch.set_grad_enabled(True), recompilations(1):
        graphs = []
        for _ in range(2):
            for state in STATES.values():
                with state():
                    # inference tensors are of another kind
                    for given in (inputs, [x.clone() for x in inputs]):
                        sparse_attention(*given, block_size=32, min_budget=32, dense_below=0)
                graphs.append(counting.frame_count)
    first, second = graphs[: len(STATES)], graphs[len(STATES) :]
    assert torch.get_num_threads() == before
    # one for each state, and two for inference mode
    assert 12 < first[-1] <= len(STATES) + 1 and second[-1] == first[-1]


def test_tf32_stays_off_while_any_thread_needs_it_off_and_is_put_back_after_an_error(matmul_precision):
    matmul_precision.use_tf32()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with without_tf32():
            inside.set()
            leave.wait()
            return matmul_precision.is_tf32()

    with ThreadPoolExecutor(1) as pool:
        with without_tf32():
            left = pool.submit(other)
            inside.wait()
        here = matmul_precision.is_tf32()
        leave.set()
    assert (here, left.result(), matmul_precision.is_tf32()) == (False, False, True)
    with pytest.raises(KeyError), without_tf32(), without_tf32():
        raise KeyError
    assert matmul_precision.is_tf32()


@pytest.mark.parametrize("then", ["the next block", "another thread"])
def test_tf32_comes_back_after_an_interrupt_at_any_line(matmul_precision, then):
    """At the latest when the next block ends."""

    def block():
        with without_tf32():
            assert not matmul_precision.is_tf32()

    matmul_precision.use_tf32()
    left = 0
    for place in interrupted(block, ("locking.py",)):
        left += not matmul_precision.is_tf32()
        (in_another_thread if then == "another thread" else lambda work: work())(block)
        assert matmul_precision.is_tf32(), place
    assert left


@pytest.mark.parametrize("generic", ["none", "tf32"])
def test_tf32_of_matmuls_or_inherited_is_put_back_as_it_was(generic, matmul_precision):
    if not matmul_precision.newer:
        pytest.skip("this torch has no precision for everything")
    products = torch.backends.cuda.matmul
    torch.backends.fp32_precision, products.fp32_precision = generic, "none" if generic == "tf32" else "tf32"
    assert products.fp32_precision == "tf32"
    with without_tf32():
        assert products.fp32_precision == "ieee"
    assert products.fp32_precision == "tf32"
    torch.backends.fp32_precision = "ieee"
    assert products.fp32_precision == ("ieee" if generic == "tf32" else "tf32")
