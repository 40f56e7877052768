"""A layer's call: finds its settings, runs it dense or over kept blocks, and records it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexmask._torch import MODULES_ARE_CONSTANTS, is_exporting, is_traced
from flexmask.attend import AttentionResult
from flexmask.base.inputs import AttentionInputs, without_autocast
from flexmask.dense_policy import head_dim_reason, log_dense_once
from flexmask.flex.block_mask import joined_mask
from flexmask.flex.packed import Segment, dense_attention_packed
from flexmask.integrations.huggingface.mask import ForwardPass, GeometryMask
from flexmask.integrations.huggingface.model_config import settings_for
from flexmask.integrations.huggingface.packed import Segments
from flexmask.integrations.huggingface.scope import is_scoped, module_of, remember, scope_of
from flexmask.integrations.record import PrefillRun
from flexmask.integrations.record.calls import CallSize
from flexmask.method import Method
from flexmask.plans import Plan, dense_plan, plan_call
from flexmask.settings import PrefillSettings, checked_for_heads
from flexmask.stats import STATISTICS, dense_stats

Plans = dict[Any, tuple[Plan, PrefillSettings]]  # by kind of layer, `LayerCall.plan`
_DENSE = PrefillSettings(dense_below=sys.maxsize)


def layer_attention(
    module: nn.Module, inputs: AttentionInputs, seq_len: int, mask: GeometryMask | None = None, segments: Segments | None = None
) -> Tensor:
    """Attention of a call or pack of `segments`, (batch, q_len, num_heads, v_head_dim); calls of one `mask` share plans."""
    if is_traced():
        if is_exporting():
            raise NotImplementedError("flexmask does not support torch.export; use torch.compile")
        # the operator finds a module by its id, if `remember` or an open scope has entered the module
        if MODULES_ARE_CONSTANTS:
            remember(module)
        if inputs.needs_grad or segments is not None or not (MODULES_ARE_CONSTANTS or is_scoped(getattr(module, "config", None))):
            return _outside_the_graph(module, inputs, seq_len, mask, segments)
        # field by field: torch.compile (2.8) cannot slice a NamedTuple
        tensors = (inputs.query, inputs.key, inputs.value)
        scores_and_geometry = (inputs.scale, inputs.softcap, inputs.window, inputs.attention_mask, inputs.offset, inputs.sinks)
        return layer_attention_operator(*tensors, *scores_and_geometry, seq_len, id(module))
    with without_autocast(inputs.query.device):
        forward_pass = None if mask is None else mask.forward_pass
        plans = None if forward_pass is None else forward_pass.plans.setdefault(mask, {})
        call = _layer_call(module, inputs, seq_len, forward_pass)._replace(plans=plans)
        out = call.output() if segments is None else call.packed_output(segments)
    return out.transpose(1, 2).contiguous()


def _layer_call(module: nn.Module, inputs: AttentionInputs, seq_len: int, forward_pass: ForwardPass | None) -> LayerCall:
    """A module's call under the settings of its open scope, else of the process or the config."""
    scope = scope_of(module) if forward_pass is None else forward_pass.scope(module)
    if scope is not None:
        settings, layer = scope.run.settings, scope.layer_of(module)
        if scope.prompt_len is not None:
            inputs = inputs.with_fields(prompt_len=scope.prompt_len)
        return LayerCall(inputs, seq_len, forward_pass, module, layer, settings, scope.run, scope.probe)
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    # an interrupt or a copied config left a block's name without a block, and a compiled forward does not restore the name
    settings, run = (_DENSE, PrefillRun()) if is_scoped(config) else (settings_for(config), None)
    return LayerCall(inputs, seq_len, forward_pass, module, -1 if index is None else index, settings, run)


class LayerCall(NamedTuple):
    """A layer's call in a forward pass, with the settings that hold for it."""

    inputs: AttentionInputs
    seq_len: int  # tokens so far, `GeometryMask.seq_len`
    forward_pass: ForwardPass | None  # None in an operator
    module: nn.Module
    layer: int
    settings: PrefillSettings
    run: PrefillRun | None = None
    probe: Callable[[LayerCall], Tensor] | None = None  # runs the call instead of the plan
    sequence: int = 0  # in a pack
    plans: Plans | None = None  # of the layers under the mask of the call

    def output(self) -> Tensor:
        """Attention of the call, (batch, num_heads, q_len, v_head_dim); records the call in the run."""
        if self.probe is not None:
            return self.probe(self._replace(probe=None))
        run = self.run
        statistics = STATISTICS if run is not None and run.collect_stats else ()
        plan = self.plan()
        result = plan.attend(self.inputs, statistics, with_maps=run is not None and run.collect_masks)
        self.record(result, plan.reason)
        return result.out

    def record(self, result: AttentionResult, reason: str | None) -> None:
        """Record the call in the run. Without a run, log why the call ran dense, if it did."""
        if self.run is None:
            log_dense_once(reason, self.inputs.query.shape[2])
            return
        batch, _, q_len, _ = self.inputs.query.shape
        mask = joined_mask(result.selections, self.inputs.with_offset()) if result.selections else None
        size = CallSize(batch, q_len, self.seq_len, self.sequence)
        self.run.record(self.layer, result.stats, mask, reason, self.forward_pass, size)

    def plan(self) -> Plan:
        """The plan for this call, shared by layers of equal settings and shapes under one mask, which has padding and offset."""
        inputs, settings = self.inputs, self.settings
        own_layer = self.layer if self.layer in settings.layers or self.layer in settings.dense_layers else None
        tensors = (inputs.query, inputs.key, inputs.value)
        shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors if tensor is not None]
        numbers = (inputs.scale, inputs.softcap, inputs.window, inputs.prompt_len, inputs.sinks is None, inputs.needs_grad)
        kind = (id(settings), own_layer, self.sequence, *shapes, *numbers)
        plans = {} if self.plans is None else self.plans
        if kind not in plans:
            # keep the settings with the plan: once they are freed, another object could get their id
            plans[kind] = self._new_plan().without_tensors(), settings
        return plans[kind][0]

    def _new_plan(self) -> Plan:
        call_options, reason = self.settings.call_options, self.call_reason()
        if reason is not None:
            return dense_plan(self.inputs, self.settings.block_size, call_options, reason)
        method = _local_method(self.settings.layer_method(self.layer), self.module, self.inputs.query.shape[1])
        return plan_call(self.inputs, method.for_inputs(self.inputs), call_options, layer=self.layer)

    def packed_output(self, segments: Sequence[Segment]) -> Tensor:
        """As `output`, for a pack of sequences, which follow one another in the batch rows."""
        batch, one_row = self.inputs.query.shape[0], _in_one_row(self.inputs.with_fields(prompt_len=None))
        calls = [
            self._replace(inputs=segment.slice_inputs(one_row), seq_len=segment.kv_len, sequence=sequence)
            for sequence, segment in enumerate(segments)
            if segment.q_len > 0
        ]
        reasons = [None if self.probe is not None else call.call_reason() for call in calls]
        dense_segments = [segments[call.sequence] for call, reason in zip(calls, reasons, strict=True) if reason is not None]
        dense_results, stats = iter(dense_attention_packed(one_row, dense_segments)), dense_stats(one_row.query)
        outputs = []
        for call, reason in zip(calls, reasons, strict=True):
            if reason is None:
                outputs.append(call.output())
            else:
                outputs.append(next(dense_results)[0])
                call.record(AttentionResult(outputs[-1], stats=stats), reason)
        out = torch.cat(outputs, 2)
        return out if batch == 1 else out[0].unflatten(1, (batch, -1)).transpose(0, 1)

    def call_reason(self) -> str | None:
        """Return why this call runs dense whatever its method, or None."""
        query, value = self.inputs.query, self.inputs.value
        assert value is not None
        policy = self.settings.call_options.policy
        heads_reason = head_dim_reason(query.shape[3], value.shape[3], self.inputs.needs_grad)
        return heads_reason or policy.size_reason(query.shape[2], self.seq_len)


def _in_one_row(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with all batch rows concatenated into one."""
    if inputs.query.shape[0] == 1:
        return inputs
    tensors = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    rows = {name: tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0) for name, tensor in tensors.items() if tensor is not None}
    return inputs.with_fields(**rows)


def _local_method(method: Method, module: nn.Module, num_heads: int) -> Method:
    """`method` with the options of this process's heads: under tensor parallelism equal shares of all heads, in order."""
    all_heads = method.num_heads
    if all_heads is None or all_heads == num_heads or all_heads % num_heads:
        return method
    rank = _rank(module, all_heads // num_heads)
    if rank is None:
        return method
    return checked_for_heads(method, all_heads).slice_heads(slice(rank * num_heads, (rank + 1) * num_heads))


def _rank(module: nn.Module, processes: int) -> int | None:
    """The process's rank among tensor-parallel `processes` that share a module; None if they do not share it."""
    for parameter in module.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        names = tuple(mesh.mesh_dim_names or ())
        # other dimensions of a mesh spread batches or layers
        dim = names.index("tp") if "tp" in names else 0 if mesh.ndim == 1 and not names else None
        if dim is not None and mesh.size(dim) == processes:
            return mesh.get_local_rank(dim)
    return None


_outside_the_graph = torch.compiler.disable(layer_attention)
# a captured graph would skip the Python that makes masks and statistics
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


@torch.library.custom_op(
    "flexmask::prefill",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, float scale, float? softcap, SymInt? window, Tensor? attention_mask, "
    "Tensor? offset, Tensor? sinks, SymInt seq_len, int module) -> Tensor",
    **_TAGS,
)
def layer_attention_operator(*arguments: Any) -> Tensor:
    """`layer_attention` as an opaque operator: a model's open scopes change between calls of its compiled forward."""
    *inputs, seq_len, module = arguments
    return layer_attention(module_of(module), AttentionInputs(*inputs), seq_len)


@layer_attention_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    batch, num_heads, q_len, _ = query.shape
    return query.new_empty((batch, q_len, num_heads, value.shape[3]))
