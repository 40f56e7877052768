"""Launches of kernels: each gives its own result, whatever was launched before."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from flexmask.kernels.launch import kernel

pytestmark = pytest.mark.gpu


def add(x, out, length, times, stride, CONSTANT: tl.constexpr):
    """Write ``times * x + CONSTANT``, an entry per program."""
    index = tl.program_id(0)
    if index < length:
        tl.store(out + index, tl.load(x + index * stride).to(tl.float32) * times + CONSTANT)


def added(run, x, length, times, constant):
    out = torch.zeros(length, dtype=torch.float32, device=x.device)
    run[(length,)](x, out, length, times, x.stride(0), CONSTANT=constant, num_warps=1)
    return out


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


def test_constants_out_of_order_are_refused(cuda):
    x = torch.ones(4, device=cuda)
    with pytest.raises(TypeError, match=r"in the order \('CONSTANT',\)"):
        kernel(add)[(4,)](x, torch.zeros_like(x), 4, 2, 1, num_warps=1, CONSTANT=3)


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
