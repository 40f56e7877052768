"""The only place that compiles functions: on first use, once each."""

from __future__ import annotations

import functools
import logging
import types
import zlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from flexmask._torch import (
    ambient_state,
    any_thread_exports,
    has_real_storage,
    is_traced,
    modes_that_disable_compile,
    ran_out_of_recompilations,
    recompile_limit,
    with_dynamic,
    without_function_modes,
)
from flexmask.base.inputs import AttentionInputs
from flexmask.logged_once import first_time

_log = logging.getLogger("flexmask")


def compiled(function: Callable[..., Any], numbers: tuple[Hashable, ...], *variant: Hashable) -> Callable[..., Any]:
    """`function`, compiled once for each `numbers` (constants), `variant` and `ambient_state`; itself while torch traces."""
    return function if is_traced() else _compile(function, numbers, variant)


@functools.cache
def _compile(function: Callable[..., Any], numbers: tuple[Hashable, ...], variant: tuple[Hashable, ...]) -> Callable[..., Any]:
    # Dynamo remembers by a code's name which numbers changed. With one name for all, the block size becomes symbolic, and on
    # torch 2.11 a graph of another block size ran, apparently from the disk cache.
    name = f"{function.__name__}_{zlib.crc32(repr(numbers).encode()):08x}"

    @functools.cache
    def compiled_in(state: Hashable) -> Callable[..., Any]:
        _log.warning(
            "flexmask: compiling %s, once; this takes seconds to a minute",
            _what_is_new(function.__name__, numbers, variant, state),
        )
        copy = types.FunctionType(
            function.__code__.replace(co_name=name), function.__globals__, name, function.__defaults__, function.__closure__
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        run = torch.compile(copy, fullgraph=True)
        if run is copy and any_thread_exports():
            # kept, it would stay uncompiled
            raise RuntimeError(
                "torch.compile compiles nothing new while torch.export runs, be it in another thread; call again after the export"
            )
        return run

    def call(*arguments: Any) -> Any:
        try:
            # torch guards by tensor whether it was made in inference mode
            made_in_inference = tuple(x.is_inference() for x in arguments if isinstance(x, Tensor))
            run = compiled_in((ambient_state(), made_in_inference))
            with without_function_modes():
                return run(*arguments)
        except Exception as error:
            if not ran_out_of_recompilations(error):
                raise
            raise RuntimeError(
                f"torch.compile has used up its recompilations of {function.__name__}, which never runs uncompiled: raise "
                f"torch._dynamo.config.{recompile_limit()}, or call torch.compiler.reset() if what was compiled is not needed"
            ) from error

    return call


def _what_is_new(name: str, numbers: tuple[Hashable, ...], variant: tuple[Hashable, ...], state: Hashable) -> str:
    """Words that describe a compilation and no other; if its kind was compiled before, they say what differs."""
    words = f"{name} ({', '.join(str(part) for part in variant if isinstance(part, (str, torch.dtype)))})"
    by_part = {"other heads or sizes": numbers, "another mode (gradients, autocast, threads)": state}
    is_first = first_time(words)
    new = [part for part, value in by_part.items() if first_time(words, part, value)]
    return words if is_first else f"{words} again, for {' and '.join(new) or 'another combination of its sizes and modes'}"


def run_compiled(function: Callable[..., Any], variant: tuple[Hashable, ...], inputs: AttentionInputs, *rest: Any) -> Any:
    """Call ``function(inputs, *rest)``, on accelerators compiled per `variant` and kind of inputs; `rest[0]` is block_size."""
    query, key = inputs.query, inputs.key
    if runs_uncompiled(query):
        return function(inputs, *rest)
    batch, num_heads, q_len, head_dim = query.shape
    device = (query.device.type, query.device.index, query.dtype)
    numbers = (num_heads, key.shape[1], head_dim, rest[0], inputs.scale, inputs.softcap)
    # larger numbers may not fit into the int32 of a symbol
    window, prompt_len = (None if number is None else min(number, 2**30) for number in (inputs.window, inputs.prompt_len))
    # in words, for the log
    properties = (
        "one prompt" if batch == 1 else "several prompts",
        "whole" if q_len == key.shape[2] else "chunks",
        None if window is None else "a window",
        None if inputs.offset is None else "an offset",
        None if inputs.attention_mask is None else "padding",
        *(x is None for x in rest),
    )
    run = compiled(function, numbers, *variant, *device, *properties)
    mask = None if inputs.attention_mask is None else with_dynamic(inputs.attention_mask, 1)
    # drop unused fields to avoid recompilations
    dynamic_query, dynamic_key = with_dynamic(query, 2), with_dynamic(key, 2)
    scores = (inputs.scale, inputs.softcap, window)
    return run(AttentionInputs(dynamic_query, dynamic_key, None, *scores, mask, inputs.offset, prompt_len=prompt_len), *rest)


def runs_uncompiled(query: Tensor) -> bool:
    """True on CPUs, where compiling takes longer than it saves, in a surrounding compilation, and where none can run."""
    return query.device.type == "cpu" or is_traced() or not has_real_storage(query) or bool(modes_that_disable_compile())
