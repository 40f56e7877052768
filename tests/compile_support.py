"""Shared by the tests of compilation, most of which trace with a backend that compiles nothing."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask

from flexmask import compilation
from flexmask._torch import is_traced, recompile_limit
from flexmask.selection import prepare
from tests.cases import structured_inputs
from tests.expected import masked_attention, pairs_under

SPARSE: dict[str, Any] = {"gamma": 0.6, "block_size": 32, "min_budget": 0}

QUERY, KEY = structured_inputs(torch.Generator().manual_seed(6), 2, 4, 2, 600, 600, head_dim=16)
# heads of both kinds: block means do not predict sharp attention
QUERY[:, 1::2] *= 6
VALUE = torch.randn(2, 2, 600, 24, generator=torch.Generator().manual_seed(6))

PADDING = torch.ones(2, 600, dtype=torch.int64)
PADDING[0, :70] = 0
PADDING[1, 540:545] = 0


@contextlib.contextmanager
def set_to(value: Any, read: Callable[[], Any], write: Callable[[Any], None]) -> Iterator[None]:
    """A setting of the process at another value, and back."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def default_dtype(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    return set_to(dtype, torch.get_default_dtype, torch.set_default_dtype)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Forget what was compiled, before and after; without gradients."""

    def forget() -> None:
        torch._dynamo.reset()
        compilation._compile.cache_clear()

    forget()
    with torch.no_grad():
        yield
    forget()


@pytest.fixture(autouse=True)
def fresh_compiler():
    with forgotten():
        yield


def recompilations(most: int) -> contextlib.AbstractContextManager[None]:
    """Let torch compile a function again this often."""
    return torch._dynamo.config.patch({recompile_limit(): most})


@pytest.fixture
def as_on_accelerators(monkeypatch):
    """Compile methods on this CPU too."""
    for module in (compilation, prepare):
        monkeypatch.setattr(module, "runs_uncompiled", lambda query: is_traced())


@pytest.fixture
def counting(monkeypatch):
    """Let the project compile with a backend that only counts graphs; attention's results are worthless then."""
    counter, compile_ = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(compilation.torch, "compile", lambda function, **options: compile_(function, **options, backend=counter))
    with forgotten():
        yield counter


def cut(length: int, batch: int = 2, num_kv_heads: int = 2) -> list[Tensor]:
    """Query, key and value of a prompt; copies, since a view brings its whole tensor's shape into the guards."""
    return [
        x[:batch, :heads, :length].clone(memory_format=torch.contiguous_format)
        for x, heads in ((QUERY, 4), (KEY, num_kv_heads), (VALUE, num_kv_heads))
    ]


def traced(function: Callable[..., Any], backend: str = "eager", **options: Any) -> tuple[Callable[..., Any], Any]:
    """`function` compiled whole, and the counter of its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def dense_under(mask: BlockMask, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Dense attention under a mask written out, rounded to the query's dtype."""
    return masked_attention(query, key, value, pairs_under(mask, query.shape[2], key.shape[2]))[0].to(query.dtype)


def lists_of(mask: BlockMask) -> tuple[Tensor, ...]:
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices


def assert_same_lists(mask: BlockMask, expected: BlockMask) -> None:
    assert all(map(torch.equal, lists_of(mask), lists_of(expected)))
    assert mask.shape == expected.shape
