"""Block-sparse attention by FlexAttention's compiled kernel."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flexmask._torch import captured, runs_flex_attention_uncompiled, without_autocast
from flexmask.base.inputs import AttentionInputs
from flexmask.base.scores import capped
from flexmask.compilation import compiled
from flexmask.flex.backend import kernel_options
from flexmask.flex.sinks import with_sink_block, with_sinks


def run_flex_attention(
    inputs: AttentionInputs, block_mask: BlockMask, backend: str, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Block-sparse attention by the compiled kernel, never by flex_attention's uncompiled path, which ignores block lists.

    Sinks rescale the output by the kernel's log-sum-exp; on CPUs, which have none, they are one more block of keys.
    """
    if runs_flex_attention_uncompiled():
        # a break in the surrounding graph, or its error with fullgraph: outside, the kernel has a compilation of its own
        return _outside_the_graph(inputs, block_mask, backend, return_lse)
    query, key, value, sinks = inputs.query, inputs.key, inputs.value, inputs.sinks
    assert value is not None
    scale, softcap = inputs.scale, inputs.softcap
    on_cpu = backend == "cpu"
    if sinks is not None and on_cpu:
        key, value, block_mask = with_sink_block(key, value, block_mask)
        sinks = captured(sinks.float())
    head_dim = query.shape[3]
    options = kernel_options(backend, block_mask.BLOCK_SIZE[0], head_dim, query.dtype)
    shapes = (
        query.device.type,
        query.device.index,
        query.dtype,
        query.shape[0],
        query.shape[1],
        key.shape[1],
        head_dim,
        value.shape[3],
        block_mask.BLOCK_SIZE,
    )
    needs_lse = return_lse or (sinks is not None and not on_cpu)
    fixed = (scale, softcap, backend, needs_lse, torch.is_grad_enabled(), block_mask.mask_mod.__name__)
    run = compiled(_flex_attention, *shapes, *fixed)
    # As text, which is always a constant. A float becomes symbolic once another variant had another one (dynamo remembers values
    # by their place in the source), and score_mods cannot capture a symbolic float. Traced from outside it may already be one.
    limit = softcap if softcap is None or torch.compiler.is_compiling() else repr(float(softcap))
    with without_autocast(query.device):
        out, lse = run(query, key, value, block_mask, scale, limit, options, needs_lse, sinks if on_cpu else None)
    if sinks is not None and lse is not None:
        out = with_sinks(out, lse, sinks)
    return out, lse if return_lse else None


_outside_the_graph = torch.compiler.disable(run_flex_attention)


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    scale: float,
    limit: float | str | None,
    options: dict[str, Any] | None,
    return_lse: bool,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    # what is compiled takes its tensors and constants one by one: fields of a tuple that it does not read would be guarded too
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "torch.compile is switched off (TORCH_COMPILE_DISABLE, a compiler stance or torch._dynamo.config.disable): "
            "flex_attention would run uncompiled and ignore the block lists. Switch it on, or call dense attention."
        )

    softcap = None if limit is None else float(limit) if isinstance(limit, str) else limit

    def cap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return capped(score, softcap)

    def cap_and_sink(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert sinks is not None
        return torch.where(kv_idx == 0, sinks[h], capped(score, softcap))

    score_mod = cap_and_sink if sinks is not None else None if softcap is None else cap
    enable_gqa = query.shape[1] != key.shape[1]
    attend = functools.partial(flex_attention, query, key, value, score_mod, block_mask, scale, enable_gqa)
    if return_lse:
        out, lse = attend(return_lse=True, kernel_options=cast(Any, options))
        return out, lse
    return attend(kernel_options=cast(Any, options)), None
