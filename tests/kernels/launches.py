"""A kernel's launches without a GPU: what stands for Triton notes them."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from flexmask.kernels import launch


def add(x, out, length, times, stride, CONSTANT: tl.constexpr):
    """Write ``times * x + CONSTANT``, an entry per program."""
    index = tl.program_id(0)
    if index < length:
        tl.store(out + index, tl.load(x + index * stride).to(tl.float32) * times + CONSTANT)


class OnGPU(torch.Tensor):
    """A tensor of the host that says that it is on GPU `number`."""

    is_cuda = True
    number = 0

    def get_device(self):
        return self.number


class Launches:
    """In the place of Triton's kernel: what it compiles for is what Triton specializes `add` on; notes what runs."""

    __name__ = "add"

    def __init__(self):
        self.function = jit.JITFunction(add, do_not_specialize=list(launch.DO_NOT_SPECIALIZE))
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = jit.create_function_from_signature(self.function.signature, self.function.params, backend)
        self.compiled, self.through_triton, self.ran = 0, 0, []

    def kind(self, *given, **constants):
        bound, specialization, options = self.bind(*given, debug=False, **constants)
        return given[0].get_device(), repr(specialization), repr(options), bound["CONSTANT"]

    def __getitem__(self, grid):
        def compiled(*given, **constants):
            kind = self.kind(*given, **constants)
            self.through_triton += 1
            run = lambda *call: self.ran.append((kind, call))  # noqa: E731
            return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

        return compiled


@pytest.fixture
def launched(monkeypatch):
    """A kernel as on a GPU, with `Launches` in the place of Triton's."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip("launches go through this Triton")
    launches = Launches()
    monkeypatch.setattr(launch.triton, "jit", lambda function, do_not_specialize: launches.function)
    monkeypatch.setattr(launch.driver, "_active", SimpleNamespace(get_current_stream=lambda device: f"stream {device}"))
    run = launch.kernel(add)
    run.jit = launches
    return run, launches
