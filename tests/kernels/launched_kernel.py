"""A kernel for tests of launches: Triton reads the source of a module's functions."""

import triton.language as tl


def add(x, out, length, times, stride, CONSTANT: tl.constexpr):
    """Write ``times * x + CONSTANT``, an entry per program."""
    index = tl.program_id(0)
    if index < length:
        tl.store(out + index, tl.load(x + index * stride).to(tl.float32) * times + CONSTANT)
