"""The attention function of transformers: sparse for prefills, dense for decoding.

The way of a call: `attention`, with the checks of refusals.py -> `serve` -> `prefill_call` -> `PrefillCall.output` (call.py)
-> `attend` (flexmask/attend.py). A compiled forward reaches `serve` through `prefill_operator`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import is_exporting, is_traced
from flexmask.base.inputs import AttentionInputs, without_autocast
from flexmask.flex.dense import attention_to_visible, dense_attention
from flexmask.integrations.huggingface.call import PrefillCall, of_local_heads
from flexmask.integrations.huggingface.compat import refusal
from flexmask.integrations.huggingface.mask import PrefillPass
from flexmask.integrations.huggingface.model_config import settings_for
from flexmask.integrations.huggingface.packed import Segments
from flexmask.integrations.huggingface.refusals import check_arguments, checked_inputs, checked_mask, checked_segments
from flexmask.integrations.huggingface.session import scope_of


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention call of transformers: heads first in, (batch, q_len, num_heads, head_dim) out."""
    if dropout != 0:
        raise refusal(f"dropout {dropout}", "model.eval()")
    check_arguments(module, kwargs)
    scores = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if query.shape[2] != 1 or isinstance(attention_mask, BlockMask):
        mask = checked_mask(module, is_causal, attention_mask, query, key)
        segments = checked_segments(mask, query, kwargs)
        return serve(module, checked_inputs(query, key, value, mask, scores), mask.tokens, mask.prefill, segments), None
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise refusal("a 4-D attention_mask of numbers", "one of booleans, True = visible")
    inputs = checked_inputs(query, key, value, None, scores)
    with without_autocast(query.device):
        if attention_mask is None:
            out = dense_attention(inputs)[0]
        else:
            visible = attention_mask[..., : key.shape[2]]
            out = attention_to_visible(inputs, inputs.query, visible, ~visible.any(-2).any(1))[0]
        return out.transpose(1, 2).contiguous(), None


def serve(
    module: nn.Module, inputs: AttentionInputs, tokens: int, prefill: PrefillPass | None = None, segments: Segments | None = None
) -> Tensor:
    """Attention of one prefill call or pack, (batch, q_len, num_heads, v_head_dim); arguments as in `prefill_call`."""
    if is_traced():
        if is_exporting():
            raise NotImplementedError("flexmask does not serve torch.export; use torch.compile")
        if inputs.needs_grad or segments is not None:
            return _outside_the_graph(module, inputs, tokens, prefill, segments)
        # field by field: torch.compile (2.8) cannot slice a NamedTuple
        tensors = (inputs.query, inputs.key, inputs.value)
        seen = (inputs.scale, inputs.softcap, inputs.window, inputs.attention_mask, inputs.offset, inputs.sinks)
        return prefill_operator(*tensors, *seen, tokens, _noted(id(module)))
    with without_autocast(inputs.query.device):
        call = prefill_call(module, inputs, tokens, prefill)
        out = call.output() if segments is None else call.packed_output(segments)
    return out.transpose(1, 2).contiguous()


def prefill_call(module: nn.Module, inputs: AttentionInputs, tokens: int, prefill: PrefillPass | None = None) -> PrefillCall:
    """A module's call under the settings of the scope that serves it, else of the process or the config."""
    scope = scope_of(module)
    if prefill is not None:
        scope = prefill.scope(scope)
    if scope is None:
        run, probe, settings = None, None, settings_for(getattr(module, "config", None))
        index = getattr(module, "layer_idx", None)
        layer = -1 if index is None else index
    else:
        run, probe, settings, layer = scope.run, scope.probe, scope.run.settings, scope.session.layer_of(module)
    selector = of_local_heads(settings.selector(layer), module, inputs.query.shape[1])
    return PrefillCall(inputs, tokens, prefill, layer, settings, selector, run, probe)


_outside_the_graph = torch.compiler.disable(serve)
# per process: operators of compiled forwards take tensors, numbers and strings, no modules
_MODULES: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def _note(number: int) -> int:
    _MODULES[number] = ctypes.cast(number, ctypes.py_object).value
    return number


# While torch.compile traces, before 2.13, such a function takes numbers and no modules. id() guards on the module.
_noted: Callable[[int], int] = torch.compiler.assume_constant_result(_note)
# a captured graph would skip the Python that makes masks and statistics
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


@torch.library.custom_op(
    "flexmask::prefill",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, float scale, float? softcap, SymInt? window, Tensor? attention_mask, "
    "Tensor? offset, Tensor? sinks, SymInt tokens, int module) -> Tensor",
    **_TAGS,
)
def prefill_operator(*arguments: Any) -> Tensor:
    """`serve` as an opaque operator: a model's open scopes change between calls of its compiled forward."""
    *inputs, tokens, module = arguments
    return serve(_MODULES[module], AttentionInputs(*inputs), tokens)


@prefill_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    batch, num_heads, q_len, _ = query.shape
    return query.new_empty((batch, q_len, num_heads, value.shape[3]))
