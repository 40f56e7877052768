"""The role of a layer on one rank: sparse with its method and options, or stock."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from flexmask.base.inputs import AttentionInputs
from flexmask.call_options import CallOptions
from flexmask.dense_policy import head_dim_reason
from flexmask.method import Method
from flexmask.settings import PrefillSettings, checked_for_heads

_CHUNK = (400, 1000)  # rows, and tokens so far, of a chunk that every method must support


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerShape:
    """The heads of a layer on one rank, and how they compute scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    softcap: float | None = None
    window: int | None = None
    has_sinks: bool = False

    def inputs_of(self, rows: int, seq_len: int, device: torch.device) -> AttentionInputs:
        """Inputs of this shape that take no memory."""
        one = torch.empty(1, dtype=torch.bfloat16, device=device)
        query = one.expand(1, self.num_heads, rows, self.head_dim)
        key = one.expand(1, self.num_kv_heads, seq_len, self.head_dim)
        return AttentionInputs(query, key, key, self.scale, self.softcap, self.window)

    def keeps_every_block_by_head(self, method: Method) -> list[bool]:
        """By query head: True if the method keeps all its blocks. TypeError or ValueError if the method takes no chunks."""
        inputs = self.inputs_of(*_CHUNK, torch.device("cpu")).with_offset()
        return method.for_inputs(inputs).keeps_every_block_by_head(self.num_heads)


@dataclass(frozen=True, eq=False, kw_only=True)
class SparseLayer(LayerShape):
    """The role of a layer on this rank whose long prefills run sparse: its shape, method and call options."""

    layer_index: int  # in the model
    method: Method
    call_options: CallOptions

    @property
    def variant(self) -> tuple[Any, ...]:
        """What kernels are compiled for: shape, method and options, except options that are numbers on the device."""
        method, options = self.method, self.method.options
        numbers = {*method.per_head_options, *method.pair_options, *(name for name in method.float_options if options[name])}
        return (*self._fixed, *((name, value) for name, value in options.items() if name not in numbers))

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """Shape, method and options, by which layers share plans."""
        return (*self._fixed, *self.method.options.items())

    @property
    def _fixed(self) -> tuple[Any, ...]:
        return (*(getattr(self, field.name) for field in fields(LayerShape)), self.method.name, self.method.block_size)

    def with_gamma(self, gamma: float | None) -> SparseLayer:
        """The role with one gamma for all heads, for which nothing is compiled again; None: the role itself."""
        return self if gamma is None else _with_gamma(self, gamma)


@dataclass(frozen=True)
class Stock:
    """The role of a layer that runs on the engine's own kernel in every step, and why."""

    reason: str


Role = SparseLayer | Stock


@functools.lru_cache(maxsize=1024)  # for recent requests: a new object would compute its `kind` again in each step
def _with_gamma(role: SparseLayer, gamma: float) -> SparseLayer:
    return replace(role, method=role.method.with_options(gamma=gamma))


def role_of_shape(shape: LayerShape, layer_index: int, settings: PrefillSettings, rank: int = 0, ranks: int = 1) -> Role:
    """The role of a layer on a rank with an equal share of its heads; TypeError or ValueError for options that do not fit."""
    call_options, policy = settings.call_options, settings.call_options.policy
    reason = head_dim_reason(shape.head_dim, shape.v_head_dim) or policy.dense_layer_reason(layer_index, shape.window)
    if reason is not None:
        return Stock(reason)
    method = checked_for_heads(settings.layer_method(layer_index), shape.num_heads * ranks, f"layer {layer_index}: ")
    role = SparseLayer(
        **vars(shape),
        layer_index=layer_index,
        method=method.slice_heads(slice(rank * shape.num_heads, (rank + 1) * shape.num_heads)),
        call_options=call_options,
    )
    reason = policy.selection_reason(role.keeps_every_block_by_head(role.method))
    return role if reason is None else Stock(reason)
