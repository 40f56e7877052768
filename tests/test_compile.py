"""Traced whole, compiled a handful of times, and never run uncompiled without saying so.

Tracing and the counting of recompilations do not depend on the backend, so most tests trace with one that compiles nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from flexmask import FlexPrefillConfig, _torch, compilation, flexprefill_attention, flexprefill_mask
from flexmask.backends import run_flex_attention
from flexmask.block_masks import MASKS, causal_mask
from tests.helpers import structured_inputs

CPP_ERROR = pytest.mark.xfail(
    not _torch.CPU_TAKES_UNBACKED_SIZES, reason="this torch writes C++ that does not compile: flexmask._torch"
)

ROOT = Path(__file__).resolve().parent.parent
SPARSE: dict[str, Any] = {"gamma": 0.6, "block_size": 32, "min_budget": 0}
LENGTHS = (600, 333, 512, 64, 65, 100, 127, 128, 129, 160, 200, 255, 256, 257, 300, 384, 401, 450, 555, 599)

QUERY, KEY = structured_inputs(torch.Generator().manual_seed(6), 2, 4, 2, 600, 600, head_dim=16)
# heads of both kinds: where attention is sharp, block means do not predict it
QUERY[:, 1::2] *= 6
VALUE = torch.randn(2, 2, 600, 24, generator=torch.Generator().manual_seed(6))


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing compiled before a test, and nothing left of it."""

    def forget() -> None:
        torch._dynamo.reset()
        compilation._compile.cache_clear()

    forget()
    with torch.no_grad():
        yield
    forget()


def cut(length: int, batch: int = 2, num_kv_heads: int = 2) -> list[Tensor]:
    """Query, key and value of a prompt; copies, since a view would bring its whole tensor's shape into the guards."""
    return [
        x[:batch, :heads, :length].clone(memory_format=torch.contiguous_format)
        for x, heads in ((QUERY, 4), (KEY, num_kv_heads), (VALUE, num_kv_heads))
    ]


def traced(function: Callable[..., Any], backend: str = "eager", **options: Any) -> tuple[Callable[..., Any], Any]:
    """`function` compiled whole, and the counter of its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def dense_under(mask: BlockMask, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Dense attention under the mask written out; rows that see nothing give zero."""
    batch, heads = mask.shape[:2]
    pairs = create_mask(mask.mask_mod, batch, heads, query.shape[2], key.shape[2], device=query.device)
    sees = pairs.any(-1, keepdim=True)
    return torch.where(sees, F.scaled_dot_product_attention(query, key, value, attn_mask=pairs | ~sees, enable_gqa=True), 0.0)


def assert_same_lists(mask: BlockMask, expected: BlockMask) -> None:
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    assert mask.shape == expected.shape


def test_what_is_traced_here_is_sparse():
    _, stats = flexprefill_mask(QUERY, KEY, **SPARSE, return_stats=True)
    assert (stats.density < 0.9).all()
    assert stats.is_query_aware.any()
    assert not stats.is_query_aware.all()


# Traced whole

PADDING = torch.ones(2, 600, dtype=torch.int64)
PADDING[0, :70] = 0
PADDING[1, 540:545] = 0

OPTIONS: dict[str, dict[str, Any]] = {
    "padded window": {"attention_mask": PADDING, "window": 200, "softcap": 20.0, "scale": 0.2},
    "other rules": {"query_aware": "per_query", "pattern_queries": "middle", "max_budget": 128},
    "published": {"selection": "reference"},
    "everything kept": {"gamma": 1.0, "tau": 0},
    "shared by union": {"share_kv_heads": "union"},
    "shared by mean": {"share_kv_heads": "mean"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_mask_and_statistics_are_traced_whole(options):
    query, key = (x[:, :, :576].contiguous() for x in (QUERY, KEY))
    options = {**SPARSE, **options, "return_stats": True}
    if "attention_mask" in options:
        options["attention_mask"] = options["attention_mask"][:, :576]

    run, counter = traced(lambda query, key: flexprefill_mask(query, key, **options))
    (mask, stats), (expected, expected_stats) = run(query, key), flexprefill_mask(query, key, **options)
    assert_same_lists(mask, expected)
    for name, value in vars(expected_stats).items():
        assert torch.equal(torch.as_tensor(getattr(stats, name)), torch.as_tensor(value)), name
    assert counter.frame_count == 1


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_config_is_traced(where):
    options = {"gamma": 1.0, "tau": 0.0, "block_size": 32}  # the least to trace
    made_outside = FlexPrefillConfig(**options)

    def mask(query, key):
        config = FlexPrefillConfig(**options) if where == "inside" else made_outside
        return flexprefill_mask(query, key, config=config)

    assert_same_lists(traced(mask)[0](QUERY, KEY), flexprefill_mask(QUERY, KEY, **options))


def test_mask_has_no_mutation_that_a_compiler_must_undo():
    run, _ = traced(lambda query, key: flexprefill_mask(query, key, **SPARSE), backend="aot_eager")
    assert_same_lists(run(QUERY, KEY), flexprefill_mask(QUERY, KEY, **SPARSE))


@pytest.mark.attention
@pytest.mark.slow
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
        mask = MASKS[name](query, key, **options)
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=tiles)

    tiles = None if device == "cpu" else {"BLOCK_M": 32, "BLOCK_N": 32}
    expected = dense_under(MASKS[name](query, key, **options), query, key, value)
    torch.testing.assert_close(attend(query, key, value), expected, atol=2e-5, rtol=0)


# A handful of compilations


@pytest.mark.attention
def test_mask_and_attention_in_one_function_serve_all_lengths():
    def attend(query, key, value):
        mask = flexprefill_mask(query, key, **SPARSE)
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True), mask.kv_num_blocks

    run, counter = traced(attend, dynamic=True)
    for length in LENGTHS:
        inputs = cut(length, batch=1, num_kv_heads=1)
        out, counts = run(*inputs)
        mask = flexprefill_mask(*inputs[:2], **SPARSE)
        assert torch.equal(counts, mask.kv_num_blocks)
        torch.testing.assert_close(out, dense_under(mask, *inputs), atol=2e-5, rtol=0)
    assert counter.frame_count <= 2


@pytest.mark.attention
def test_attention_inside_another_compilation_is_one_graph():
    run, counter = traced(lambda *inputs: flexprefill_attention(*inputs, **SPARSE, dense_below=0))
    assert run(*cut(200)).shape == (2, 4, 200, 24)
    assert counter.frame_count == 1


def test_changing_numbers_are_not_compiled_each():
    def mask(query, key, gamma, tau, q_offset):
        return flexprefill_mask(query, key, gamma, tau, block_size=32, min_budget=0, q_offset=q_offset)

    run, counter = traced(mask)
    query = QUERY[:, :, :100].contiguous()
    for step in range(1, 8):
        # torch 2.5 takes every float for a constant
        floats = (0.6, 0.1) if torch._dynamo.config.specialize_float else (step / 10, step / 20)
        numbers = *floats, 61 * step
        assert_same_lists(run(query, KEY, *numbers), mask(query, KEY, *numbers))
    assert counter.frame_count <= 2


@pytest.mark.attention
@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=CPP_ERROR)], ids=["whole", "padded"])
def test_attention_called_plainly_serves_all_lengths(padded):
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for length in LENGTHS:
        inputs = cut(length)
        options = {**SPARSE, "attention_mask": PADDING[:, -length:]} if padded else SPARSE
        out = flexprefill_attention(*inputs, **options, dense_below=0)
        # sparse indeed, at every length: a silent dense fallback would not equal it
        torch.testing.assert_close(out, dense_under(flexprefill_mask(*inputs[:2], **options), *inputs), atol=2e-5, rtol=0)
    assert 1 <= graphs["unique_graphs"] - before <= 5


@pytest.mark.attention
@pytest.mark.slow
@CPP_ERROR
def test_masks_in_a_compilation_of_the_user_serve_all_lengths():
    run = torch.compile(lambda *inputs: flex_attention(*inputs[:3], block_mask=inputs[3], enable_gqa=True), fullgraph=True)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for step, length in enumerate(LENGTHS):
        inputs = cut(length)
        mask = flexprefill_mask(*inputs[:2], **SPARSE, attention_mask=PADDING[:, -length:], window=100 + step)
        torch.testing.assert_close(run(*inputs, mask), dense_under(mask, *inputs), atol=2e-5, rtol=0)
    assert 1 <= graphs["unique_graphs"] - before <= 3


@pytest.fixture
def counting(monkeypatch):
    """Let the project compile with a backend that only counts graphs; attention's results are worthless then."""
    counter, compile_ = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(compilation.torch, "compile", lambda function, **options: compile_(function, **options, backend=counter))
    return counter


@pytest.mark.attention
def test_calls_of_all_kinds_share_the_compilations_of_one_model(counting):
    for batch in (1, 2):
        for length in LENGTHS[:8]:
            query, key, value = cut(length, batch)
            flexprefill_attention(query, key, value, **SPARSE, dense_below=0)
            # a chunk, and the layout in which Hugging Face's models hand queries over
            query = query[:, :, length // 2 :].transpose(1, 2).contiguous().transpose(1, 2)
            flexprefill_attention(query, key, value, **SPARSE, dense_below=0)
    assert counting.frame_count <= getattr(torch._dynamo.config, _torch.recompile_limit())


@pytest.mark.attention
def test_one_model_does_not_use_up_the_compilations_of_another(counting):
    with torch._dynamo.config.patch({_torch.recompile_limit(): 2}):
        for head_dim in (16, 32, 48, 64):
            for length in (100, 200, 300):
                query, key = torch.randn(1, 2, length, head_dim), torch.randn(1, 1, length, head_dim)
                flexprefill_attention(query, key, key, block_size=32, dense_below=0)
    assert 4 <= counting.frame_count <= 2 * 4


def test_heads_stay_numbers_in_the_search(monkeypatch):
    """Torch keeps what sizes it saw change by the name of a function, which variants for other numbers of heads share."""
    seen = []

    def backend(graph, inputs):
        values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        seen.append([[size for size in x.shape[1:] if type(size) is int] for x in values if isinstance(x, Tensor)])
        return graph.forward

    def scores(query: Tensor, key: Tensor) -> Tensor:
        return query.sum() * key.sum()

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_with(function, backend=backend, **options))
    for heads, length in ((4, 600), (2, 333), (4, 100)):
        query, key, _ = cut(length)
        query = query[:, :heads].contiguous()
        compilation.compiled(scores, heads)(_torch.with_dynamic(query, 2), _torch.with_dynamic(key, 2))
    assert seen == [[[4, 16], [2, 16]], [[2, 16], [2, 16]]]


def test_mask_on_a_cpu_compiles_nothing(counting):
    flexprefill_mask(QUERY, KEY, **SPARSE)
    assert counting.frame_count == 0


# Dense attention without a word: where flex_attention would ignore the block lists


@pytest.mark.attention
def test_recompilations_that_run_out_raise(counting):
    inputs = cut(200)
    query, key, value = cut(300)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # no graph serves both layouts
    with torch._dynamo.config.patch({_torch.recompile_limit(): 1}):
        out = flexprefill_attention(*inputs, **SPARSE, dense_below=0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"never runs uncompiled: raise .*\.{_torch.recompile_limit()}"):
                flexprefill_attention(query, key, value, **SPARSE, dense_below=0)
        assert torch.equal(flexprefill_attention(*inputs, **SPARSE, dense_below=0), out)
    assert counting.frame_count == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_uncompiled_flex_attention_ignores_the_lists_but_not_an_honest_mask_mod():
    query, key, value = cut(200)
    inputs = query, key, value[..., :16]  # torch 2.5 takes powers of two only
    mask = flexprefill_mask(*inputs[:2], **SPARSE)
    expected = dense_under(mask, *inputs)
    torch.testing.assert_close(flex_attention(*inputs, block_mask=mask, enable_gqa=True), expected, atol=2e-5, rtol=0)
    mask.mask_mod = causal_mask(*inputs[:2], block_size=32).mask_mod
    assert (flex_attention(*inputs, block_mask=mask, enable_gqa=True) - expected).abs().max() > 0.1


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


SWITCHED_OFF = """
    import torch
    from torch.nn.attention.flex_attention import create_mask
    from flexmask import flexprefill_attention, flexprefill_mask

    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 200, 16)
    options = {"gamma": 0.5, "block_size": 32, "min_budget": 0}
    mask = flexprefill_mask(query, key, **options)
    assert mask.sparsity() > 50  # causal: 42

    # an honest mask: the mask_mod says what the lists say
    pairs = create_mask(mask.mask_mod, 1, 2, 200, 200, device="cpu")
    in_blocks = mask.to_dense().bool().repeat_interleave(32, 2).repeat_interleave(32, 3)[..., :200, :200]
    assert torch.equal(pairs, in_blocks & torch.ones(200, 200, dtype=torch.bool).tril())

    flexprefill_attention(query, key, value, **options)  # dense by rule: short
    try:
        flexprefill_attention(query, key, value, **options, dense_below=0)
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.attention
def test_attention_raises_and_the_mask_works_under_torch_compile_disable():
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SWITCHED_OFF)],
        cwd=ROOT,
        env={**os.environ, "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "torch.compile is switched off" in run.stdout


# A bad call leaves no trace


@pytest.mark.attention
def test_refused_call_leaves_later_ones_as_they_were():
    inputs = cut(200)
    query, key, value = inputs
    for wrong in ({"gamma": 2.0}, {"window": 0}, {"q_offset": 7}, {"attention_mask": torch.ones(2, 199)}):
        with pytest.raises((ValueError, TypeError)):
            flexprefill_attention(*inputs, **{**SPARSE, **wrong}, dense_below=0)
    with pytest.raises(ValueError, match="value must have key's batch"):
        flexprefill_attention(query, key, value[:, :, 1:], **SPARSE, dense_below=0)
    mask = flexprefill_mask(query, key, **SPARSE)
    with pytest.raises(Unsupported):  # flex_attention's own refusal, while it is traced
        run_flex_attention(query, key[:, :, 1:], value[:, :, 1:], mask, 0.25, None, "cpu", return_lse=False)
    out = flexprefill_attention(*inputs, **SPARSE, dense_below=0)
    torch.testing.assert_close(out, dense_under(mask, *inputs), atol=2e-5, rtol=0)


def test_refused_call_inside_a_compilation_leaves_later_ones_as_they_were():
    run, counter = traced(lambda query, key: flexprefill_mask(query, key, **SPARSE))
    # torch 2.5 and 2.8 pass on that an exception was raised, but not what it says
    says = _torch.RELEASE >= (2, 13)
    with pytest.raises(Unsupported, match="q_len must be at most key's kv_len 600; got 601" if says else "Observed exception"):
        run(F.pad(QUERY, (0, 0, 0, 1)), KEY)
    assert_same_lists(run(QUERY, KEY), flexprefill_mask(QUERY, KEY, **SPARSE))
    assert counter.frame_count == 1
