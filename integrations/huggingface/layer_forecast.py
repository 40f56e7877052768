"""Predicts per layer whether a prompt would run sparse, from the model's config only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel

from flexmask.environment import one_line
from flexmask.integrations.huggingface.attention import attention
from flexmask.integrations.huggingface.call import LayerCall, Plans
from flexmask.integrations.huggingface.compat import learned_positions, text_config
from flexmask.integrations.huggingface.context_manager import opened_scope
from flexmask.integrations.huggingface.mask import GeometryMask, geometry_mask
from flexmask.integrations.huggingface.model_config import model_settings
from flexmask.integrations.huggingface.scope import scope_of
from flexmask.integrations.record import PrefillRun
from flexmask.settings import PrefillSettings

SPARSE, DENSE, REFUSED, UNREACHED = "sparse", "dense", "refused", "not reached"
_NAME = "flexmask_layer_forecast"
# The forward on the meta device reads this many tokens, enough for models that add a key per group of tokens. Attention gets
# tensors of the prompt's full length, expanded from one number
_FORWARD_TOKENS = 256


class LayerForecast(NamedTuple):
    """The forecast for a prompt in one layer."""

    layer: int
    # "sparse", "dense", "refused" (the forward would raise) or "not reached" (it calls no attention of transformers')
    outcome: str
    reason: str  # why the outcome is not sparse
    # the fields below are None if the layer calls no attention
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    backend: str = ""


def layer_forecast(
    config: Any,
    method: str | Callable[..., BlockMask] | None = None,
    settings: PrefillSettings | str | Path | None = None,
    *,
    tokens: int = 32768,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    **options: Any,
) -> list[LayerForecast]:
    """Predict for every layer of a model whether a prompt would run sparse, dense or not at all, and why.

    `config` is as from ``AutoConfig.from_pretrained``; `method`, `settings` and `options` are as in `sparse_prefill`, by default
    those in the config. `tokens` >= 2 is the prompt's length. Backends depend on `device` and `dtype`, by default float32 on the
    CPU, bfloat16 elsewhere.

    Raises
    ------
    NotImplementedError, RuntimeError
        For a model that `sparse_prefill` refuses; for one whose forward needs values, not only shapes.
    TypeError, ValueError
        For a config without a causal model, unknown options, and options for layers that the model lacks.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=2)
    >>> [(layer.outcome, layer.head_dim) for layer in layer_forecast(config, dense_layers=(0,))]
    [('dense', 128), ('sparse', 128)]
    """
    device = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"config must be one that AutoModelForCausalLM makes a model of; got {type(config).__name__}")
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    # kernels for experts support only bfloat16
    model = model.eval().to(torch.bfloat16)
    num_layers = getattr(text_config(model), "num_hidden_layers", 0)
    run = PrefillRun(model_settings(model, method=method, settings=settings, **options), collect_stats=False)
    max_positions = learned_positions(model)
    if max_positions is not None and tokens > max_positions:
        reason = f"{tokens:,} tokens exceed the {max_positions:,} positions that the model has learned"
        return [LayerForecast(layer, REFUSED, reason) for layer in range(num_layers)]
    forecaster, error = _Forecaster(tokens, torch.zeros((), device=device, dtype=dtype)), None
    forecasts = forecaster.layers
    # most models need only shapes if they get a mask, some only if they get none
    for arguments in ({"attention_mask": torch.ones((1, _FORWARD_TOKENS), dtype=torch.long, device="meta")}, {"use_cache": True}):
        forecasts.clear()
        error = _forward_error(model, run, forecaster, arguments)
        if error is None or len(forecasts) == num_layers or _is_refusal(error):
            break
    if error is not None and len(forecasts) < num_layers:
        line = one_line(error)
        if not _is_refusal(error):
            raise RuntimeError(f"cannot follow {type(model).__name__} without weights: {line}") from error
        # the model's own code read more of its mask than a `GeometryMask` has, which ended the forward
        forecasts |= {layer: LayerForecast(layer, REFUSED, line) for layer in range(num_layers) if layer not in forecasts}
    layer_types = getattr(text_config(model), "layer_types", None) or ()
    for layer in range(num_layers):
        has_type = layer < len(layer_types)
        reason = f"a layer of {layer_types[layer]}" if has_type else "no call of transformers' attention interface"
        forecasts.setdefault(layer, LayerForecast(layer, UNREACHED, reason))
    return [forecasts[layer] for layer in sorted(forecasts)]


class _Forecaster:
    """A scope's probe, which notes what every layer's call would do at full length."""

    def __init__(self, tokens: int, stand_in: Tensor) -> None:
        self.tokens, self.stand_in = tokens, stand_in
        self.layers: dict[int, LayerForecast] = {}
        self._plans: Plans = {}

    def __call__(self, call: LayerCall) -> Tensor:
        plan, query, key, value = call._replace(plans=self._plans).plan(), call.inputs.query, call.inputs.key, call.inputs.value
        assert value is not None
        reason, backend = plan.reason, "" if plan.reason else plan.backend.name
        sizes = (query.shape[1], key.shape[1], query.shape[3], call.inputs.window)
        self.layers[call.layer] = LayerForecast(call.layer, DENSE if reason else SPARSE, reason or "", *sizes, backend)
        return torch.empty((*query.shape[:3], value.shape[3]), device="meta", dtype=query.dtype)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    """Run the adapter's attention on stand-ins. If the attention refuses the call, note why, and let the forward go on."""
    scope = scope_of(module)
    assert scope is not None and isinstance(scope.probe, _Forecaster)
    forecaster, mask = scope.probe, attention_mask
    shapes: list[tuple[int, ...]] = [tensor.shape for tensor in (query, key, value)]
    if isinstance(mask, GeometryMask) and {shape[2] for shape in (mask.shape, *shapes)} == {mask.shape[3]} == {_FORWARD_TOKENS}:
        tokens = forecaster.tokens
        shapes = [(*shape[:2], tokens, shape[3]) for shape in shapes]
        mask = GeometryMask((*mask.shape[:2], tokens, tokens), 0, window=mask.window, refusal=mask.refusal)
    stand_ins = [forecaster.stand_in.expand(shape) for shape in shapes]
    if isinstance(arguments.get("s_aux"), Tensor):
        arguments["s_aux"] = forecaster.stand_in.expand(arguments["s_aux"].shape)
    try:
        attention(module, stand_ins[0], stand_ins[1], stand_ins[2], mask, **arguments)
    except (NotImplementedError, ValueError) as error:
        layer = scope.layer_of(module)
        forecaster.layers[layer] = LayerForecast(layer, REFUSED, str(error), query.shape[1], key.shape[1], query.shape[3])
    return torch.empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]), device="meta", dtype=query.dtype), None


def _forward_error(
    model: PreTrainedModel, run: PrefillRun, forecaster: _Forecaster, arguments: dict[str, Any]
) -> Exception | None:
    """Run the forward on the meta device, and return the exception that it raised, or None."""
    # both functions stay registered, as they have no state
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, lambda **arguments: geometry_mask(**arguments | {"attention_mask": None}))
    ids = torch.zeros((1, _FORWARD_TOKENS), dtype=torch.long, device="meta")
    try:
        with opened_scope(model, run, forecaster) as scope, torch.no_grad():
            scope.config._attn_implementation_internal = _NAME
            try:
                model(input_ids=ids, **arguments)
            except Exception as error:
                return error
    except ValueError as error:
        raise NotImplementedError(str(error)) from error
    return None


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) and "flexmask" in str(error)
