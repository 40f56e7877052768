"""One request's chunk in a step: its rows, its keys and values, and its attention by a plan that layers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flexmask.attend import AttentionResult
from flexmask.base.inputs import attention_inputs
from flexmask.integrations.serving.layers import SparseLayer
from flexmask.plans import Plan, plan_call


@dataclass(frozen=True)
class SparseRequest:
    """A request of a step whose chunk runs sparse."""

    batch_index: int  # of the step's requests, also in the block table
    start: int  # rows of the packed batch
    stop: int
    seq_len: int  # tokens so far, including this chunk
    prompt_len: int | None = None  # tokens of its prompt; None: the chunk ends it
    gamma: float | None = None  # the request's; None: the server's
    # by kind of role, and dtype (`attend_chunk`)
    plans: dict[Any, Plan] = field(default_factory=dict, compare=False)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def cached_len(self) -> int:
        """Tokens before the chunk."""
        return self.seq_len - (self.stop - self.start)


def attend_chunk(
    role: SparseLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None,
    request: SparseRequest | None = None, statistics: tuple[str, ...] = (), with_counts: bool = False, out: Tensor | None = None,
) -> AttentionResult:  # fmt: skip
    """Causal attention of a chunk whose last row is at the last key, at any length, with the results of `Plan.attend`.

    `query` is (rows, num_heads, head_dim), `key` and `value` are contiguous (num_kv_heads, seq_len, head_dim), `sinks`
    (num_heads,). Layers of one kind share the plan of a `request`; without one the plan is this call's, and the chunk ends its
    prompt. The output is (rows, num_heads, v_head_dim), written into `out` if the kernel can.
    """
    # contiguous as in the warm-up: kernels are compiled for the memory layout
    tensors = query.contiguous().transpose(0, 1)[None], key[None], value[None]
    request = request or SparseRequest(0, 0, query.shape[0], key.shape[1])
    kind = (role.kind, query.dtype)
    plan = request.plans.get(kind)
    if plan is None:
        # has an effect only if the prompt goes on after this chunk
        prompt_len = request.prompt_len if (request.prompt_len or 0) > key.shape[1] else None
        inputs = attention_inputs(
            *tensors, scale=role.scale, softcap=role.softcap, window=role.window, sinks=sinks, prompt_len=prompt_len
        )
        # at any length, because the split of the step has decided that the chunk runs sparse
        plan = plan_call(inputs, role.method.for_inputs(inputs), role.call_options, at_any_length=True)
        plan = request.plans[kind] = plan.without_tensors().with_replay()
    else:
        # one chunk and one kind of layer: the inputs fit the plan
        inputs = plan.inputs.with_fields(query=tensors[0], key=tensors[1], value=tensors[2], sinks=sinks)
    if out is not None:
        inputs = inputs.with_fields(out=out.transpose(0, 1)[None])
    attended = plan.attend(inputs, statistics, with_counts=with_counts)
    return attended._replace(out=attended.out[0].transpose(0, 1))


def concat_cached(cached: Tensor | None, chunk: Tensor, scale: Tensor | float | None = None, skipped: int = 0) -> Tensor:
    """Concatenate a request's cached keys or values with its chunk's; contiguous (num_kv_heads, seq_len, head_dim).

    `cached` is (num_kv_heads, cached_len - skipped, head_dim), None for a first chunk; `chunk` is (rows, num_kv_heads, head_dim)
    and copied as it is. An FP8 cache holds numbers divided by `scale`, one number or one per KV head; products are rounded once.
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
            # torch rounds a float32 scale to the dtype of the rows unless it has dimensions
            earlier.mul_(scale if isinstance(scale, float) else scale.view(-1, 1, 1))
    return out
