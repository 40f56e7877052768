"""Traced whole, never uncompiled without an error, unchanged by a refused call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.exc import Unsupported
from torch.nn.attention.flex_attention import flex_attention

from flexmask import _torch, flexprefill_mask, sparse_attention, sparse_attention_varlen
from tests.attention_calls import flexprefill_attention
from tests.cases import mask_function
from tests.compile_support import KEY, PADDING, QUERY, SPARSE, assert_same_lists, cut, dense_under, lists_of, traced
from tests.compile_support import fresh_compiler as fresh_compiler


@pytest.mark.attention
@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("causal", "cpu"),  # FlexPrefill's search takes Inductor over a minute on a CPU
        pytest.param("causal", "cuda", marks=pytest.mark.gpu),
        pytest.param("flexprefill", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_mask_and_attention_are_compiled_whole(name, device):
    # with all that a mask_mod captures: offset and padding
    query, key, value = (x.to(device) for x in cut(200))
    query = query[:, :, 80:].clone(memory_format=torch.contiguous_format)
    options = {"block_size": 32, "q_offset": 65, "attention_mask": PADDING[:, :200].to(device), "window": 90}
    if name == "flexprefill":
        options |= SPARSE

    @torch.compile(fullgraph=True)
    def attend(query, key, value):
        mask = mask_function(name)(query, key, **options)
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=tiles)

    tiles = None if device == "cpu" else {"BLOCK_M": 32, "BLOCK_N": 32}
    expected = dense_under(mask_function(name)(query, key, **options), query, key, value)
    torch.testing.assert_close(attend(query, key, value), expected, atol=2e-5, rtol=0)


@pytest.mark.attention
@pytest.mark.parametrize("switch", ["stance", "configuration"])
def test_attention_raises_where_compilation_is_switched_off(switch):
    off = torch.compiler.set_stance("force_eager") if switch == "stance" else torch._dynamo.config.patch(disable=True)
    inputs = cut(200)
    with off:
        mask = flexprefill_mask(*inputs[:2], **SPARSE)
        with pytest.raises(RuntimeError, match=r"torch\.compile is switched off .* ignore the block lists"):
            flexprefill_attention(*inputs, **SPARSE, dense_below=0)
    assert_same_lists(mask, flexprefill_mask(*inputs[:2], **SPARSE))


def test_refused_call_inside_a_compilation_leaves_later_ones_as_they_were():
    run, counter = traced(lambda query, key: flexprefill_mask(query, key, **SPARSE))
    # torch 2.5 and 2.8 drop the message
    says = _torch.RELEASE >= (2, 13)
    with pytest.raises(Unsupported, match="q_len must be at most key's kv_len 600; got 601" if says else "Observed exception"):
        run(F.pad(QUERY, (0, 0, 0, 1)), KEY)
    assert_same_lists(run(QUERY, KEY), flexprefill_mask(QUERY, KEY, **SPARSE))
    assert counter.frame_count == 1


@pytest.mark.attention
def test_attention_stays_sparse_under_other_compilers_than_inductor():
    """They would run flex_attention as traced, dense."""

    def attend(query, key, value):
        return flexprefill_attention(query, key, value, **SPARSE, dense_below=0)

    query, key, value = torch.randn(3, 1, 2, 512, 16, generator=torch.Generator().manual_seed(0)).unbind()
    expected = attend(query, key, value)
    assert (expected - F.scaled_dot_product_attention(query, key, value, is_causal=True)).abs().max() > 1e-2
    torch.testing.assert_close(torch.compile(attend, backend="eager")(query, key, value), expected, atol=2e-5, rtol=0)
    torch._dynamo.reset()
    with pytest.raises(Unsupported):
        torch.compile(attend, backend="eager", fullgraph=True)(query, key, value)


def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return sparse_attention_varlen(query, key, value, [0, 100, 200], [0, 100, 200], **options)


EXPORTED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "hybrid": (sparse_attention, SPARSE),
    "causal": (sparse_attention, {"method": "causal", "block_size": 32}),
    "packed": (packed, {"method": "flexprefill", **SPARSE}),
}


class Module(torch.nn.Module):
    def __init__(self, call: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.call, self.options = call, options

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.call(*inputs, **self.options)


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="torch 2.5 and 2.6 do not say that they export")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_sparse_attention_is_not_exported(name, strict):
    inputs, (call, options) = tuple(x[:1] for x in cut(200)), EXPORTED[name]
    # older releases drop the message in strict mode
    told = r"torch\.export cannot take sparse attention: .* make the call dense by dense_below"
    with pytest.raises(Exception, match="." if strict and _torch.RELEASE < (2, 13) else told) as raised:
        torch.export.export(Module(call, **options, dense_below=0), inputs, strict=strict)
    assert strict or raised.type is NotImplementedError


LISTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    f"lists of {name}": (lambda query, key, value, name=name: lists_of(mask_function(name)(query, key, **SPARSE)), {})
    for name in ("flexprefill", "hybrid")
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("call", "options"), [*EXPORTED.values(), *LISTS.values()], ids=[*EXPORTED, *LISTS])
def test_dense_attention_and_block_lists_are_exported(call, options, strict):
    if _torch.RELEASE < (2, 6) and (call not in (sparse_attention, packed) or (strict and call is packed)):
        pytest.skip("torch 2.5 cannot export the vmap in masks, nor, strictly, sizes of packs")
    inputs, module = tuple(x[:1] for x in cut(200)), Module(call, **options)
    program = torch.export.export(module, inputs, strict=strict).module()
    other = (3 * inputs[0], inputs[1] + 1, inputs[2])
    torch.testing.assert_close(program(*other), module(*other))
