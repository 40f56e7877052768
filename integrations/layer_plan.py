"""Layer by layer, what FlexPrefill would do in a model: found from its config alone, without weights and without a prompt.

The model is built on the meta device, where tensors have shapes and no memory, and its forward runs there with the adapter's own
attention call. It reads a few tokens, for recurrent layers loop over them; attention is asked about a prompt of the full length,
with tensors that are one number expanded to their shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel

from flexmask.flex.backend import chosen_backend
from flexmask.integrations.attention_call import attention_call
from flexmask.integrations.blocks import OpenBlock, model_settings
from flexmask.integrations.models import check_servable, text_config
from flexmask.integrations.prefill_mask import PrefillMask, prefill_mask
from flexmask.integrations.registration import register
from flexmask.integrations.route import PrefillCall, reason_dense_layer, reason_no_mask
from flexmask.integrations.run import FlexPrefillRun
from flexmask.integrations.settings import PrefillSettings
from flexmask.integrations.versions import autocast_on_meta
from flexmask.plain.published import check_published

SPARSE, DENSE, REFUSED, UNREACHED = "sparse", "dense", "refused", "not reached"
_NAME = "flexprefill_layer_plan"
# tokens; enough for models that add a key for every so many of them
_READ = 256


class PlannedLayer(NamedTuple):
    """The plan of one layer of a model: sparse, dense or refused, and why.

    Attributes
    ----------
    layer : int
    plan : str
        ``"sparse"``, ``"dense"``, ``"refused"`` (the model's forward would raise) or ``"not reached"`` (the layer does not call
        transformers' attention interface, as layers of a recurrent kind).
    reason : str
        Why it is not sparse; empty where it is.
    heads, kv_heads, head_dim : int or None
        Of its attention call, None where there is none.
    window : int or None
        Its sliding window, in tokens.
    backend : str
        FlexAttention's backend for it; empty where it is not sparse.
    """

    layer: int
    plan: str
    reason: str
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    backend: str = ""


def layer_plan(
    config: Any,
    settings: PrefillSettings | None = None,
    *,
    tokens: int = 32768,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> list[PlannedLayer]:
    """Say of every layer of a model whether a prompt would run sparse in it, dense or not at all, and why.

    Parameters
    ----------
    config
        A config of transformers, as ``AutoConfig.from_pretrained`` gives it.
    settings
        Default None: those in the config, else the defaults.
    tokens
        Length of the prompt, >= 2. Default 32768; nothing of that size is computed.
    device, dtype
        Those that the model is to run with; backends depend on them. Default: the CPU, and float32 there, else bfloat16.

    Returns
    -------
    list of PlannedLayer

    Raises
    ------
    NotImplementedError
        For a model that is refused as a whole, as by `flexprefill`, or does not go through transformers' attention interface.
    RuntimeError
        For a model whose forward needs numbers, not only shapes: then nothing is known.
    ValueError
        For a config that no causal model is made of, and `settings` for layers that the model does not have.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=2)
    >>> [(each.plan, each.head_dim) for each in layer_plan(config, PrefillSettings(dense_layers=(0,)))]
    [('dense', 128), ('sparse', 128)]
    """
    device = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = _without_weights(config)
    if settings is None:
        settings = model_settings(model, None, None, {})
    else:
        settings.check_layers(getattr(text_config(model), "num_hidden_layers", 0))
    check_servable(model)
    register()
    found: dict[int, PlannedLayer] = {}
    run = FlexPrefillRun(settings, collect_stats=False, probe=lambda call: _note(found, call))
    stand_in = torch.zeros((), device=device, dtype=dtype)
    number = getattr(text_config(model), "num_hidden_layers", 0)
    error: Exception | None = None
    # with a mask most models look at shapes alone, without one some others
    for arguments in ({"attention_mask": torch.ones((1, _READ), dtype=torch.long, device="meta")}, {"use_cache": True}):
        found.clear()
        error = _follow(model, run, _planned_call(found, run, stand_in, tokens), arguments)
        if error is None or len(found) == number or _is_refusal(error):
            break
    if error is not None and len(found) < number:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        if not _is_refusal(error):
            raise RuntimeError(f"cannot follow {type(model).__name__} without weights: {line}") from error
        # the model's own code asked too much of our mask
        found |= {layer: PlannedLayer(layer, REFUSED, line) for layer in range(number) if layer not in found}
    kinds = getattr(text_config(model), "layer_types", None) or ()
    for layer in range(number):
        what = f"a layer of {kinds[layer]}" if layer < len(kinds) else "no call of transformers' attention interface"
        found.setdefault(layer, PlannedLayer(layer, UNREACHED, what))
    return [found[layer] for layer in sorted(found)]


def _without_weights(config: Any) -> PreTrainedModel:
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"config must be one that AutoModelForCausalLM makes a model of; got {type(config).__name__}")
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    # the kernels that multiply the matrices of experts take no other dtype
    return model.eval().to(torch.bfloat16)


def _note(found: dict[int, PlannedLayer], call: PrefillCall) -> Tensor:
    """Serve as the probe of a run: note what `route` would do with a call."""
    check_published(call.config, call.inputs)
    reason = reason_no_mask(call) or reason_dense_layer(call)
    query, key, value = call.inputs.query, call.inputs.key, call.inputs.value
    assert value is not None
    backend = "" if reason else chosen_backend(call.settings.backend, call.inputs, call.config.block_size, False)
    sizes = (query.shape[1], key.shape[1], query.shape[3], call.inputs.window)
    found[call.layer] = PlannedLayer(call.layer, DENSE if reason else SPARSE, reason or "", *sizes, backend)
    return torch.empty((*query.shape[:3], value.shape[3]), device="meta", dtype=query.dtype)


def _planned_call(
    found: dict[int, PlannedLayer], run: FlexPrefillRun, stand_in: Tensor, tokens: int
) -> Callable[..., tuple[Tensor, None]]:
    """The adapter's attention call on stand-ins; what it refuses is noted, and the model goes on to its next layer."""

    def longer(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:2], tokens, *shape[3:])

    def call(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        mask = attention_mask
        shapes: list[tuple[int, ...]] = [x.shape for x in (query, key, value)]
        if isinstance(mask, PrefillMask) and {shape[2] for shape in (mask.shape, *shapes)} == {mask.shape[3]} == {_READ}:
            shapes = [longer(shape) for shape in shapes]
            mask = PrefillMask((*mask.shape[:2], tokens, tokens), 0, window=mask.window, refusal=mask.refusal)
        given = [stand_in.expand(shape) for shape in shapes]
        if isinstance(arguments.get("s_aux"), Tensor):
            arguments["s_aux"] = stand_in.expand(arguments["s_aux"].shape)
        try:
            with torch.no_grad():
                attention_call(module, given[0], given[1], given[2], mask, **arguments)
        except (NotImplementedError, ValueError) as error:
            layer = run.calls.layer_of(module)
            sizes = (query.shape[1], key.shape[1], query.shape[3])
            found[layer] = PlannedLayer(layer, REFUSED, str(error), *sizes)
        out_shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return torch.empty(out_shape, device="meta", dtype=query.dtype), None

    return call


def _follow(model: PreTrainedModel, run: FlexPrefillRun, call: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    """Run the model's forward on the meta device with `call` as its attention; return what it raised."""
    AttentionInterface.register(_NAME, call)
    AttentionMaskInterface.register(_NAME, _mask_without_padding)
    ids = torch.zeros((1, _READ), dtype=torch.long, device="meta")
    try:
        block = OpenBlock.enter(model, run)
    except ValueError as error:
        raise NotImplementedError(str(error)) from error
    try:
        for config in block.configs:
            config._attn_implementation_internal = _NAME
        with torch.no_grad(), autocast_on_meta(), _passing_over(model):
            model(input_ids=ids, **arguments)
    except Exception as error:
        return error
    finally:
        block.leave()
    return None


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) and "flexprefill" in str(error)


def _mask_without_padding(**arguments: Any) -> Any:
    return prefill_mask(**arguments | {"attention_mask": None})


@contextmanager
def _passing_over(model: PreTrainedModel) -> Iterator[None]:
    """Let modules whose code needs numbers give their input: routers that gather the tokens of each expert."""

    def guarded(forward: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
                if given is None or "meta" not in str(error).lower():
                    raise
                return given

        return guarded_forward

    inner = [module for module in model.modules() if not isinstance(module, PreTrainedModel)]
    for module in inner:
        module.forward = guarded(module.forward)
    try:
        yield
    finally:
        for module in inner:
            del module.forward
