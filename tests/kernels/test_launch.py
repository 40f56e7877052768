"""Launches of kernels: each gives its own result, whatever was launched before."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

import triton

from flexmask.kernels.launch import kernel
from tests.kernels.launches import OnGPU, add
from tests.kernels.launches import launched as launched


def added(run, x, length, times, constant):
    out = torch.zeros(length, dtype=torch.float32, device=x.device)
    run[(length,)](x, out, length, times, x.stride(0), CONSTANT=constant, num_warps=1)
    return out


@pytest.mark.gpu
def test_every_launch_gives_its_own_result(cuda):
    run, numbers = kernel(add), torch.arange(100.0, device=cuda)
    views = (numbers, numbers[1:], numbers[::2], numbers[::16], numbers[:1])
    dtypes = (torch.float32, torch.bfloat16, torch.int32)
    for _, dtype, view in itertools.product(range(2), dtypes, views):
        x = torch.empty(200, device=cuda, dtype=dtype)[1 : 1 + 2 * len(view) : 2].copy_(view)
        lengths = (len(view), max(1, len(view) // 2))
        for given, times, constant, length in itertools.product((x, x.contiguous()), (1, 3, 16, 2**33), (0, 5), lengths):
            expected = view[:length].to(dtype).double() * times + constant
            torch.testing.assert_close(added(run, given, length, times, constant).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not hasattr(triton, "knobs"), reason="hooks have another place before Triton 3.4")
def test_a_profilers_hook_sees_every_launch(cuda):
    run, x, seen = kernel(add), torch.ones(4, device=cuda), []
    added(run, x, 4, 2, 0)
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        for _ in range(2):
            added(run, x, 4, 2, 0)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 2


@pytest.mark.parametrize("by_place", [False, True], ids=["constants by name", "by place"])
def test_what_runs_was_compiled_for_what_triton_specializes_on(launched, by_place):
    """From the second launch of a kind on, by Triton's own analysis on the host; no kind is compiled twice."""
    run, launches = launched
    memory = torch.zeros(64).as_subclass(OnGPU)
    elsewhere = torch.zeros(64).as_subclass(OnGPU)
    elsewhere.number = 1
    tensors = [memory, memory[1:], memory[2:], memory[4:], memory.to(torch.int32), elsewhere]
    numbers = (0, 1, 2, 15, 16, 17, 48, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**62 + 1)
    calls = [(x, out, length, times, stride) for x in tensors for out in (memory, memory[3:], tensors[4])
             for length in (1, 7, 2**31) for times in numbers for stride in numbers]  # fmt: skip
    if by_place:
        calls = calls[::97]
    kinds = set()
    for given, constant, warps in (*((each, 5, 1) for each in calls), *itertools.product(calls[::97], (0, 5, 16), (1, 2))):
        passed = (*given, constant) if by_place else given
        options = {"num_warps": warps} if by_place else {"CONSTANT": constant, "num_warps": warps}
        kind, before = launches.kind(*passed, **options), launches.through_triton
        run[(7, 3)](*passed, **options)
        kinds.add(kind)
        assert launches.through_triton > before or launches.ran[-1] == (
            kind,
            (7, 3, 1, f"stream {given[0].get_device()}", "function", "metadata", None, None, None,
             *[x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given], constant),
        )  # fmt: skip
    assert launches.through_triton == len(kinds)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_constants_and_hosts_take_triton_s_way(launched, hook):
    run, launches = launched
    x = torch.zeros(64).as_subclass(OnGPU)

    def launch_it(x):
        run[(1,)](x, x, 4, 2, 1, CONSTANT=3, num_warps=1)
        return launches.through_triton, len(launches.ran)

    with pytest.raises(TypeError, match=r"add takes its constants in the order \('CONSTANT',\)"):
        run[(1,)](x, x, 4, 2, 1, num_warps=1, CONSTANT=3)
    assert [launch_it(x), launch_it(x)] == [(1, 0), (1, 1)]
    getattr(triton.knobs.runtime, hook).add(print)
    try:
        assert launch_it(x) == (2, 1)
    finally:
        getattr(triton.knobs.runtime, hook).remove(print)
    assert launch_it(x) == (2, 2)
    on_the_host = torch.zeros(64)
    assert [launch_it(on_the_host), launch_it(on_the_host)] == [(3, 2), (4, 2)]
