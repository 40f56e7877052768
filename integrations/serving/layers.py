"""A layer whose long prefills run sparse, on one rank, and its attention, by a plan."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flexmask.attend import Attended
from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.call_options import CallOptions
from flexmask.dense_policy import by_head_dim
from flexmask.plans import Plan, plan_call
from flexmask.method import Method
from flexmask.settings import PrefillSettings, with_heads

_CHUNK = (400, 1000)  # rows and tokens of a chunk that every method must serve


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerShape:
    """Heads of a layer on one rank, and their scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    softcap: float | None = None
    window: int | None = None
    has_sinks: bool = False

    def inputs_of(self, rows: int, tokens: int, device: torch.device) -> AttentionInputs:
        """Inputs of this shape that take no memory."""
        one = torch.empty(1, dtype=torch.bfloat16, device=device)
        query = one.expand(1, self.num_heads, rows, self.head_dim)
        key = one.expand(1, self.num_kv_heads, tokens, self.head_dim)
        return AttentionInputs(query, key, key, self.scale, self.softcap, self.window)

    def keeps_every_block_by_head(self, method: Method) -> list[bool]:
        """For each query head: the method keeps all its blocks. TypeError or ValueError for one that cannot serve chunks."""
        inputs = self.inputs_of(*_CHUNK, torch.device("cpu")).with_offset()
        return method.for_inputs(inputs).keeps_every_block_by_head(self.num_heads)


@dataclass(frozen=True, eq=False, kw_only=True)
class SparseLayer(LayerShape):
    """A layer on this rank whose long prefills run sparse, with its method and call options."""

    number: int  # in the model
    method: Method
    call_options: CallOptions

    @property
    def variant(self) -> tuple[Any, ...]:
        """Everything that kernels are compiled for; options that are numbers on the device are not."""
        method, options = self.method, self.method.options
        numbers = {*method.by_head, *method.pairs, *(name for name in method.floats if options[name])}
        fixed = tuple((name, value) for name, value in options.items() if name not in numbers)
        shape = (getattr(self, field.name) for field in fields(LayerShape))
        return (*shape, method.name, method.block_size, fixed)

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """Layers of one kind share plans."""
        shape = (getattr(self, field.name) for field in fields(LayerShape))
        return (*shape, self.method.name, self.method.block_size, *self.method.options.items())

    def with_gamma(self, gamma: float | None) -> SparseLayer:
        """The layer with one gamma for all heads, which compiles nothing; None: as it is."""
        return self if gamma is None else _with_gamma(self, gamma)


@dataclass(frozen=True)
class Stock:
    """The role of a layer that the engine's own kernel serves in every step, and why."""

    reason: str


Role = SparseLayer | Stock


@functools.lru_cache(maxsize=1024)  # layers and gammas of recent requests: a new object would compute its kind again in each step
def _with_gamma(layer: SparseLayer, gamma: float) -> SparseLayer:
    return replace(layer, method=layer.method.with_options(gamma=gamma))


def role_of_shape(shape: LayerShape, number: int, settings: PrefillSettings, rank: int = 0, ranks: int = 1) -> Role:
    """The role of layer `number` on a rank, whose query heads are an equal share of all, in order.

    Raises TypeError or ValueError for options of another number of heads, and for a method that cannot serve the layer.
    """
    call_options = settings.call_options
    reason = by_head_dim(shape.head_dim, shape.v_head_dim) or call_options.policy.by_layer(number, shape.window)
    if reason is not None:
        return Stock(reason)
    method = with_heads(settings.layer_method(number), shape.num_heads * ranks, f"layer {number}: ")
    layer = SparseLayer(
        **vars(shape),
        number=number,
        method=method.slice_heads(slice(rank * shape.num_heads, (rank + 1) * shape.num_heads)),
        call_options=call_options,
    )
    reason = call_options.policy.by_selection(layer.keeps_every_block_by_head(layer.method))
    return layer if reason is None else Stock(reason)


def attend_chunk(
    layer: SparseLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, statistics: tuple[str, ...] = (),
    plans: dict[Any, Plan] | None = None, with_counts: bool = False, prompt_len: int | None = None,
) -> Attended:  # fmt: skip
    """Causal attention of a chunk whose last row stands at the last key, at any length, as `Plan.attend` gives it.

    `query` is (rows, num_heads, head_dim), `key` and `value` are contiguous (num_kv_heads, tokens, head_dim), `sinks`
    (num_heads,). `plans` are those of the chunk by kind of layer, and get the one of this layer; `prompt_len` is that of
    `flexmask.sparse_attention`, without effect up to `tokens`. The output is (rows, num_heads, v_head_dim).
    """
    # contiguous as in the warm-up: kernels are compiled for the memory layout
    tensors = query.contiguous().transpose(0, 1)[None], key[None], value[None]
    kind = (layer.kind, query.dtype)
    plan = None if plans is None else plans.get(kind)
    if plan is None:
        goes_on = prompt_len is not None and prompt_len > key.shape[1]
        geometry: dict[str, Any] = {"scale": layer.scale, "softcap": layer.softcap, "window": layer.window}
        geometry["prompt_len"] = prompt_len if goes_on else None
        inputs = attention_inputs(*tensors, sinks=sinks, **geometry)
        # the split of the step has decided about lengths
        plan = plan_call(inputs, layer.method.for_inputs(inputs), layer.call_options, at_any_length=True)
        if plans is not None:
            plan = plan.without_tensors().with_replay()
            plans[kind] = plan
    else:
        # of one chunk and one kind of layer: as planned
        inputs = plan.inputs.with_fields(query=tensors[0], key=tensors[1], value=tensors[2], sinks=sinks)
    attended = plan.attend(inputs, statistics, with_counts=with_counts)
    return attended._replace(out=attended.out[0].transpose(0, 1))


def concat_cached(cached: Tensor | None, chunk: Tensor, scale: Tensor | float | None = None, skipped: int = 0) -> Tensor:
    """Concatenates a request's cached keys or values with its chunk's; (num_kv_heads, tokens, head_dim), contiguous.

    `cached` is (num_kv_heads, cached_len - skipped, head_dim), None for a first chunk; `chunk` is (rows, num_kv_heads, head_dim)
    and copied as it is. An FP8 cache holds numbers divided by `scale`, one number or one per key head; products are rounded once.
    The first `skipped` tokens, which the chunk does not see, are zero; `cached` begins after them.
    """
    cached_len = skipped if cached is None else skipped + cached.shape[1]
    out = chunk.new_empty((chunk.shape[1], cached_len + chunk.shape[0], chunk.shape[2]))
    out[:, cached_len:] = chunk.transpose(0, 1)
    out[:, :skipped] = 0
    if cached is not None:
        earlier = out[:, skipped:cached_len]
        earlier.copy_(cached)
        if scale is not None:
            # with dimensions, in which a float32 scale is not rounded to the dtype of the rows
            earlier.mul_(scale if isinstance(scale, float) else scale.view(-1, 1, 1))
    return out
