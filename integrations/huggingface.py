"""FlexPrefill as an attention implementation of Hugging Face transformers. Importing this changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from flexmask.integrations.attention_call import attention_call
from flexmask.integrations.prefill_mask import HookedMask, PrefillMask, prefill_mask
from flexmask.integrations.right_padding import watch_token_ids
from flexmask.integrations.run import HOOKS, RUNS, FlexPrefillRun
from flexmask.integrations.settings import CONFIG_KEY, PrefillSettings, saved_settings
from flexmask.integrations.versions import check_release

__all__ = [
    "FlexPrefillRun",
    "PrefillSettings",
    "configure",
    "flexprefill",
    "hook_flex_attention",
    "register",
    "unhook_flex_attention",
]

NAME = "flexprefill"
_STOCK = "flex_attention"


def register() -> None:
    """Make ``"flexprefill"`` a name that ``set_attn_implementation`` and ``from_pretrained(attn_implementation=...)`` know.

    A model that is set to the name outside of `flexprefill` runs with what `configure` wrote into its config, else with the
    defaults.

    Raises
    ------
    ImportError
        With a transformers older than 4.54 or newer than 5.23.

    Examples
    --------
    >>> register()
    """
    check_release()
    AttentionInterface.register(NAME, attention_call)
    AttentionMaskInterface.register(NAME, prefill_mask)


def configure(model: PreTrainedModel, **options: Any) -> PrefillSettings:
    """Write options into a model's config, where ``save_pretrained`` keeps them: ``flexprefill_config`` in ``config.json``.

    They hold wherever the model runs with ``attn_implementation="flexprefill"``, but for a `flexprefill` block with options of
    its own. Without options: the defaults, which replace what was there.

    Parameters
    ----------
    model
        A model of transformers.
    options
        The fields of FlexPrefillConfig, or one as `config`, and those of PrefillSettings; `method` by name only.

    Returns
    -------
    PrefillSettings
        What was written.

    Raises
    ------
    TypeError, ValueError
        For a `model` that is no PreTrainedModel, for unknown options, values out of their range, layers that it does not have.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
    >>> settings = configure(model, gamma=0.9, dense_layers=(0,))
    >>> model.config.flexprefill_config
    {'gamma': 0.9, 'dense_layers': [0]}
    """
    settings = _checked(model, PrefillSettings.from_options(**options))
    setattr(_text_config(model), CONFIG_KEY, settings.to_dict())
    return settings


@contextmanager
def flexprefill(
    model: PreTrainedModel,
    gamma: float | None = None,
    tau: float | None = None,
    *,
    collect_stats: bool = True,
    collect_masks: bool = False,
    **options: Any,
) -> Iterator[FlexPrefillRun]:
    """Run a model's prefill with FlexPrefill inside a ``with`` block, and set the model back after it, also after an error.

    Calls `register`, whose names stay. Blocks may be nested; settings belong to the model, so that two models do not mix, and
    several threads that run one model need one block around them all: the end of a block sets back what its beginning found. Of
    a model with other parts than text (``config.text_config``) the text part is switched.

    Parameters
    ----------
    model
        A decoder of transformers that goes through its attention interface.
    gamma, tau
        As in `FlexPrefillConfig`.
    collect_stats
        Fill ``run.stats``; costs a little time. Default True.
    collect_masks
        Also keep the BlockMask of every prefill call. It is made a second time and held until the run is dropped: for
        pictures and tests, not for speed. Default False.
    options
        The other fields of FlexPrefillConfig, or one as `config`, and those of PrefillSettings: `dense_below`, `dense_layers`,
        `layers`, `backend`, `max_mask_bytes`, `method`. With no option at all, gamma and tau included: what `configure` wrote
        into the model's config, else the defaults.

    Yields
    ------
    FlexPrefillRun
        Its ``stats`` fill while the model runs, and can be read after the block too.

    Raises
    ------
    ImportError
        As `register`.
    TypeError, ValueError
        For a `model` that is no PreTrainedModel or cannot change its attention, for unknown options, values out of their range
        and layers that the model does not have.
    NotImplementedError
        In the model's forward, for what is not served: see the README of this folder.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> with torch.no_grad(), flexprefill(model, gamma=0.9) as run:
    ...     logits = model(torch.arange(64)[None]).logits
    >>> run.stats[1][0].dense  # layer 1, first prefill: 64 tokens are too few to gain from a mask
    True
    """
    settings = _settings(model, gamma, tau, options)
    register()
    run = FlexPrefillRun(settings, collect_stats, collect_masks)
    modules = list(model.modules())
    previous_runs = {module: RUNS.get(module) for module in modules}
    configs = {id(module.config): module.config for module in modules if isinstance(module, PreTrainedModel)}
    previous_names = [(part, part._attn_implementation) for part in configs.values()]
    text = _text_config(model)
    watch = None
    try:
        model.set_attn_implementation(NAME if text is model.config else {"text_config": NAME})
        if text._attn_implementation != NAME:
            raise ValueError(
                f"model must go through transformers' attention interface; got {type(model).__name__}, which does not"
            )
        RUNS.update(dict.fromkeys(modules, run))
        watch = watch_token_ids(model, run)
        yield run
    finally:
        if watch is not None:
            watch.remove()
        # a model's own config comes before those of its parts, which setting it overwrites
        for part, name in previous_names:
            part._attn_implementation = name
        for module, previous in previous_runs.items():
            RUNS.pop(module, None)
            if previous is not None:
                RUNS[module] = previous


def hook_flex_attention(
    model: PreTrainedModel,
    gamma: float | None = None,
    tau: float | None = None,
    *,
    collect_stats: bool = True,
    collect_masks: bool = False,
    **options: Any,
) -> FlexPrefillRun:
    """Run the prefill of a model that is loaded with ``attn_implementation="flex_attention"`` with FlexPrefill, under that name.

    The name and Hugging Face's mask stay; the selection and the compiled attention are ours, and decoding is dense. The functions
    behind ``"flex_attention"`` are replaced by ones that hand every model that was not hooked to the former ones.
    `unhook_flex_attention` ends it.

    Parameters
    ----------
    model
        A decoder whose ``config._attn_implementation`` is ``"flex_attention"``.
    gamma, tau, collect_stats, collect_masks, options
        As in `flexprefill`.

    Returns
    -------
    FlexPrefillRun
        Its ``stats`` fill while the model runs, without an end: a server passes ``collect_stats=False``.

    Raises
    ------
    ImportError, TypeError, ValueError
        As `flexprefill`, and ValueError for a model with another attention.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="flex_attention"))
    >>> run = hook_flex_attention(model, gamma=0.9)
    >>> unhook_flex_attention(model)
    """
    settings = _settings(model, gamma, tau, options)
    check_release()
    text = _text_config(model)
    if text._attn_implementation != _STOCK:
        raise ValueError(f'model must be loaded with attn_implementation="{_STOCK}"; got "{text._attn_implementation}"')
    _replace_stock()
    run = FlexPrefillRun(settings, collect_stats, collect_masks)
    _HOOKED[id(text)] = text
    HOOKS.update(dict.fromkeys(model.modules(), run))
    return run


def unhook_flex_attention(model: PreTrainedModel) -> None:
    """Give a hooked model its own attention back; does nothing to a model that is not hooked, nor to an open `flexprefill`."""
    text = _text_config(model)
    for module in model.modules():
        HOOKS.pop(module, None)
    if not any(getattr(module, "config", None) is text for module in list(HOOKS)):
        _HOOKED.pop(id(text), None)


# configs of hooked models, by identity: configs are not hashable, and mask functions know nothing else of their model
_HOOKED: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _replace_stock() -> None:
    """Put ours in front of the functions behind "flex_attention", once, also where a program has put in its own since."""
    attention, mask = AttentionInterface()[_STOCK], AttentionMaskInterface()[_STOCK]
    if getattr(attention, "hooked_by", None) != NAME:

        def hooked_attention(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | BlockMask | None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            shared = id(getattr(module, "config", None)) in _HOOKED
            if shared and module in HOOKS:
                return attention_call(module, query, key, value, attention_mask, *args, **kwargs)
            if shared and isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool:
                # one row's mask, made for a hooked model with the same config; the former function adds masks to scores
                attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
            return attention(module, query, key, value, attention_mask, *args, **kwargs)

        hooked_attention.hooked_by = NAME  # type: ignore[attr-defined]  # a mark on a function
        AttentionInterface.register(_STOCK, hooked_attention)
    if getattr(mask, "hooked_by", None) != NAME:

        def hooked_mask(**arguments: Any) -> Any:
            if id(arguments.get("config")) not in _HOOKED:
                return mask(**arguments)
            own = prefill_mask(**arguments)
            return HookedMask(own, mask(**arguments)) if isinstance(own, PrefillMask) else own

        hooked_mask.hooked_by = NAME  # type: ignore[attr-defined]  # a mark on a function
        AttentionMaskInterface.register(_STOCK, hooked_mask)


def _settings(model: PreTrainedModel, gamma: float | None, tau: float | None, options: dict[str, Any]) -> PrefillSettings:
    options = {**options, **{name: value for name, value in (("gamma", gamma), ("tau", tau)) if value is not None}}
    settings = None if options else saved_settings(_text_config(model))
    return _checked(model, settings or PrefillSettings.from_options(**options))


def _checked(model: PreTrainedModel, settings: PrefillSettings) -> PrefillSettings:
    number = getattr(_text_config(model), "num_hidden_layers", None)
    if number is not None:
        settings.check_layers(number)
    return settings


def _text_config(model: PreTrainedModel) -> Any:
    """The config that a model's attention layers have: its own, or that of its text part."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel; got {type(model).__name__}")
    return getattr(model.config, "text_config", model.config)
