"""Tensors that stand for more than their memory: refused by name, or served."""

import functools
import re

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from flexmask import flexprefill_mask, sparse_attention
from tests.public_calls import OPTIONS, inputs

pytestmark = pytest.mark.usefixtures("no_grad")


class Wrapper(torch.Tensor):
    """Holds another tensor, as quantized or spread ones do."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, function(*args, **kwargs))


class Named(torch.Tensor):
    pass


class DTensor(torch.Tensor):
    """Known by its name."""


LAYOUTS = {
    "a torch.sparse_coo": lambda x: x.to_sparse(),
    "a torch._mkldnn": lambda x: x.to_mkldnn(),
    "a nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
    "a DTensor: give each device its own heads, as to_local() returns them": lambda x: x.as_subclass(DTensor),
    "a quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
}
LIKE_MEMORY = {
    "one of type Wrapper": Wrapper,
    "one whose values are not in its memory": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
}
SPARSE = {**OPTIONS, "dense_below": 0}
NAMES = ("query", "key", "value")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning", "ignore:.*quantiz.*:UserWarning")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_other_layouts_are_refused_by_every_call(kind, name):
    given = dict(zip(NAMES, inputs(), strict=True))
    given[name] = LAYOUTS[kind](given[name])
    assert_refused(given, name, rf"got {re.escape(kind)}( tensor)?$")


def assert_refused(given, name, said):
    calls = [functools.partial(sparse_attention, **given, **options) for options in (SPARSE, OPTIONS)]
    calls += [lambda: flexprefill_mask(given["query"], given["key"], **OPTIONS)] if name != "value" else []
    for call in calls:
        with pytest.raises(TypeError, match=f"^{name} must be a plain tensor; {said}"):
            call()


def test_vmap_is_refused_by_every_call():
    def run(*given):
        assert_refused(dict(zip(NAMES, given, strict=True)), "query", r"got one inside torch\.vmap: give the batch")
        return given[0]

    torch.vmap(run)(*(x[None] for x in inputs()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("name", ["attention_mask", "q_offset", "sinks"])
def test_other_layouts_of_other_arguments_are_refused(name):
    given = {"attention_mask": torch.ones(1, 256).long(), "q_offset": torch.zeros(1).long(), "sinks": torch.zeros(4)}[name]
    with pytest.raises(TypeError, match=f"^{name} must be a plain tensor; got a torch.sparse_coo tensor$"):
        sparse_attention(*inputs(), **OPTIONS, **{name: given.to_sparse()})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", LIKE_MEMORY)
def test_what_is_not_in_memory_is_refused_by_the_kernel_and_served_dense(kind, name):
    given = dict(zip(NAMES, inputs(), strict=True))
    expected = sparse_attention(**given, **OPTIONS)
    given[name] = LIKE_MEMORY[kind](given[name])
    with pytest.raises(TypeError, match=f"^{name} must be a plain tensor for sparse attention; got {kind}"):
        sparse_attention(**given, **SPARSE)
    out = sparse_attention(**given, **OPTIONS)
    torch.testing.assert_close(out.inner if isinstance(out, Wrapper) else out, expected)


@pytest.mark.attention
def test_subclasses_without_a_dispatch_of_their_own_are_served():
    given = inputs()
    out = sparse_attention(*(x.as_subclass(Named) for x in given), **SPARSE)
    assert torch.equal(out.as_subclass(torch.Tensor), sparse_attention(*given, **SPARSE))
    assert torch.equal(sparse_attention(*(torch.nn.Parameter(x) for x in given), **SPARSE), out.as_subclass(torch.Tensor))


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "of another tensor": lambda f, x: torch.func.grad(lambda y: (y * f(x)).sum())(torch.tensor(2.0)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_sparse_attention_is_refused_inside_torch_func(name):
    query, key, value = inputs()
    with torch.enable_grad(), pytest.raises(TypeError, match=r"outside of the transforms of torch\.func .*; make the call dense"):
        TRANSFORMS[name](lambda x: sparse_attention(x, key, value, **SPARSE), query)


def test_tangents_are_not_dropped():
    query, key, value = inputs()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(value, value.clone())
        with pytest.raises(TypeError, match=r"^value must be a plain tensor .*; got one with a tangent"):
            sparse_attention(query, key, dual, **SPARSE)
        # others in the same level
        assert sparse_attention(query, key, value, method="causal", block_size=32).shape == query.shape
