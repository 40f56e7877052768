"""Modes and defaults of this thread, and what others compile or export: calls give the same, or name the mode."""

import functools
import sys

import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flexmask import flexprefill_mask, sparse_attention, sparse_attention_varlen
from tests.compile_support import default_dtype
from tests.held_open import HELD, STRICT_EXPORT, held_open
from tests.public_calls import COMPILED, OPTIONS, PADDING, UNCOMPILED, assert_same_results, attention, inputs, results, users


@pytest.fixture(scope="module")
def expected():
    """Results of all calls, by then compiled."""
    torch._dynamo.reset()  # other tests may have used up recompilations
    with torch.no_grad():
        for _ in range(2):
            found = results({**UNCOMPILED, **COMPILED})
    return found


class LoggingMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class LoggingFunctionMode(TorchFunctionMode):
    """Writes what dynamo cannot trace."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        sys.stderr.write("")
        return function(*args, **(kwargs or {}))


DISPATCH = {"FlopCounterMode": lambda: FlopCounterMode(display=False), "LoggingMode": LoggingMode}
STATES = {
    "LoggingFunctionMode": LoggingFunctionMode,
    **{f"{device} by default": functools.partial(torch.device, device) for device in ("cpu", "meta")},
    **{f"{dtype} by default": functools.partial(default_dtype, dtype) for dtype in (torch.bfloat16, torch.float64)},
}


@pytest.mark.attention
@pytest.mark.parametrize("mode", DISPATCH)
def test_calls_under_a_dispatch_mode_run_or_name_the_mode(mode, expected):
    with torch.no_grad():
        with DISPATCH[mode]():
            assert_same_results(results(UNCOMPILED), expected)
            for call in COMPILED.values():
                with pytest.raises(RuntimeError, match=rf"does not run under the mode _?{mode}, .* leave the mode"):
                    call()
        # nothing stays uncompiled
        assert_same_results(results(COMPILED), expected)


@pytest.mark.attention
@pytest.mark.parametrize(
    "state", [pytest.param(name, marks=pytest.mark.slow) if "float64" in name or "cpu" in name else name for name in STATES]
)
def test_other_modes_and_defaults_change_nothing(state, expected):
    with torch.no_grad(), STATES[state]():
        found = results({**UNCOMPILED, **COMPILED})
    assert_same_results(found, expected)


FORMS = {
    "sparse": {},
    "statistics": {"return_stats": True},
    "dense": {"dense_below": None},
    "padded window": {"window": 100, "attention_mask": PADDING},
    "groups of heads": {"max_mask_bytes": 1},
    "sinks": {"sinks": torch.zeros(4)},
    # whose values no check and no step reads
    "numbers in tensors": {"gamma": torch.tensor([0.3, 0.5, 7.0, 1.0]), "q_offset": torch.tensor([10**6])},
    "another method": {"method": "streaming_llm"},
    "a user's method": {"method": users},
}


@pytest.mark.attention
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_fake_tensors_give_shapes(form, dtype):
    options = {"dense_below": 0, "block_size": 32, **FORMS[form]}
    mode = FakeTensorMode()
    given = [mode.from_tensor(x.to(dtype)) for x in inputs()]
    options = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with torch.no_grad(), mode:
        found = sparse_attention(*given, **options)
        out, stats = found if "return_stats" in options else (found, None)
        assert type(out) is FakeTensor and out.shape == (1, 4, 256, 16) and out.dtype == dtype
        assert stats is None or stats.density.shape == (1, 4)


@pytest.mark.attention
def test_fake_tensors_give_shapes_of_packed_sequences_between_bounds_of_ints():
    given, bounds = inputs(), [0, 96, 160, 256]
    # a mode that takes real tensors too
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert sparse_attention(*given, **OPTIONS, dense_below=0).shape == (1, 4, 256, 16)
        packed = [mode.from_tensor(x)[0].transpose(0, 1) for x in given]
        assert sparse_attention_varlen(*packed, bounds, **OPTIONS, dense_below=65).shape == (256, 4, 16)
        with pytest.raises(ValueError, match="cu_seqlens_q must hold values; got a fake tensor"):
            sparse_attention_varlen(*packed, mode.from_tensor(torch.tensor(bounds)), **OPTIONS)


def test_fake_tensors_outside_of_their_mode_are_refused():
    mode = FakeTensorMode()
    given = [mode.from_tensor(x) for x in inputs()]
    calls = [functools.partial(sparse_attention, *given, **OPTIONS, dense_below=below) for below in (None, 0)]
    for call in (*calls, lambda: flexprefill_mask(*given[:2])):
        with pytest.raises(ValueError, match="query must be used under its FakeTensorMode; got a fake tensor outside of it"):
            call()


@pytest.mark.parametrize("options", [{}, {"tracing_mode": "fake"}, {"tracing_mode": "fake", "pre_dispatch": True}], ids=str)
def test_sparse_attention_is_in_no_graph_of_make_fx(options):
    def sparse(*given):
        return sparse_attention(*given, **OPTIONS, dense_below=0)

    with torch.no_grad(), pytest.raises(RuntimeError, match=r"using FX to symbolically trace|supports FakeTensorMode only"):
        make_fx(sparse, **options)(*inputs())


@pytest.mark.attention
@pytest.mark.parametrize("work", HELD.values(), ids=HELD)
def test_every_call_runs_while_another_thread_compiles(work, expected):
    with torch.no_grad(), held_open(work):
        found = results({**UNCOMPILED, **COMPILED})
    assert_same_results(found, expected)


def test_calls_that_need_no_kernel_run_during_a_strict_export():
    expected = results(UNCOMPILED)
    with held_open(STRICT_EXPORT):
        found = results(UNCOMPILED)
    assert_same_results(found, expected)


@pytest.mark.attention
@pytest.mark.filterwarnings("ignore:torch.compile is ignored when called inside torch.export region:UserWarning")
def test_attention_that_an_export_refuses_is_compiled_after_the_export():
    with torch.no_grad():
        with held_open(HELD["torch.export"]), pytest.raises(RuntimeError, match="again after the export"):
            attention(softcap=7.0)
        torch.testing.assert_close(attention(softcap=7.0), attention(softcap=7.0))
