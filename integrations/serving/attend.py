"""Sparse attention of one request's chunk, in the engine's layout."""

from __future__ import annotations

from torch import Tensor

from flexmask.attend import attend as attend_blocks
from flexmask.base.inputs import attention_inputs
from flexmask.integrations.serving.layers import SparseLayer
from flexmask.precision import without_autocast


def attend(
    layer: SparseLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, count_density: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of a chunk whose last row stands at the last key, at any length, and its mean density (0-d) if counted.

    `query` is (rows, num_heads, head_dim), `key` and `value` are contiguous (num_kv_heads, tokens, head_dim), `sinks`
    (num_heads,). Returns (rows, num_heads, v_head_dim).
    """
    # contiguous as in the warm-up: kernels are compiled for the memory layout
    inputs = attention_inputs(
        query.contiguous().transpose(0, 1)[None], key[None], value[None],
        scale=layer.scale, softcap=layer.softcap, window=layer.window, sinks=sinks,
    )  # fmt: skip
    selector = layer.selector.for_inputs(inputs)
    plan = layer.run.policy.plan(inputs, selector)
    with without_autocast(query.device):
        found = attend_blocks(inputs, selector, layer.run, plan, statistics=("density",) if count_density else ())
    density = None if found.stats is None else found.stats.density.mean()
    return found.out[0].transpose(0, 1), density
