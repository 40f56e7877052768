"""The settings of a model: named options over those of the process, over those that `configure` wrote into its config."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from flexmask.integrations.huggingface.compat import heads_of_layers, text_config, unwrapped
from flexmask.integrations.huggingface.scope import entry_of
from flexmask.settings import (
    CONFIG_KEY,
    PrefillSettings,
    SettingsOverride,
    apply_override,
    default_settings,
    heads_by_layer,
    named_settings,
    saved_settings,
)

_process_override: SettingsOverride = {}  # what `register` got, which overrides the models' configs


def set_process_settings(named: SettingsOverride) -> None:
    """Use these settings, or keywords, in the whole process; if there are none, keep the present ones."""
    global _process_override
    if not isinstance(named, PrefillSettings):
        checked = apply_override(PrefillSettings(), named)
        # copies, which the caller cannot change
        copies = {**vars(checked), **checked.options}
        named = {name: copies[name] for name in named} or _process_override
    _process_override = named


def settings_for(config: Any, named: SettingsOverride | None = None) -> PrefillSettings:
    """The defaults, those in the config, the process's and the named ones, merged in this order."""
    if isinstance(named, PrefillSettings):
        return named
    return apply_override(_with_process(cached_saved_settings(config) or default_settings()), named or {})


_merged: tuple[PrefillSettings, SettingsOverride, PrefillSettings] | None = None  # the latest of `_with_process`


def _with_process(base: PrefillSettings) -> PrefillSettings:
    """The process's settings over `base`. Returns the same object for every layer, as plans are shared by its id."""
    global _merged
    cached, process = _merged, _process_override
    if cached is None or cached[0] is not base or cached[1] is not process:
        cached = _merged = (base, process, apply_override(base, process))
    return cached[2]


def cached_saved_settings(config: Any) -> PrefillSettings | None:
    """`saved_settings` of a config, read again only after changes: without a block every layer asks for them."""
    saved = getattr(config, CONFIG_KEY, None)
    if saved is None:
        return None
    entry = entry_of(config)
    shape = heads_by_layer(config, entry.heads)
    if entry.saved is None or entry.saved[:2] != (saved, shape):
        settings = saved_settings(config, entry.heads)
        entry.saved = (copy.deepcopy(saved), shape, settings)
    return entry.saved[2]


def config_and_heads(model: PreTrainedModel) -> tuple[Any, dict[int, int]]:
    """The model's `text_config`, and the query heads of its layers, which are kept in the config's entry."""
    config = text_config(model)
    heads = entry_of(config).heads = heads_of_layers(model)
    return config, heads


def model_settings(model: PreTrainedModel, **named: Any) -> PrefillSettings:
    """The settings of a model, checked against it; `named` as in `named_settings`."""
    config, heads = config_and_heads(model)
    chosen = settings_for(config, named_settings(**named))
    chosen.check_model(config, heads)
    return chosen


def configure(
    model: Any, method: str | None = None, settings: PrefillSettings | str | Path | None = None, **options: Any
) -> PrefillSettings:
    """Write options into a model's config, where ``save_pretrained`` keeps them: ``flexmask_config`` in ``config.json``.

    They apply where the model runs with ``attn_implementation="flexmask"``, and in `sparse_prefill` blocks, whose keywords
    override them one by one. They replace all that was there; without options the defaults do.

    Parameters
    ----------
    model
        A model of transformers, wrapped or not, as in `sparse_prefill`.
    method, settings, options
        As in `sparse_prefill`; `method` by name only.

    Returns
    -------
    PrefillSettings
        The settings written.

    Raises
    ------
    TypeError, ValueError
        For a `model` that is not one of transformers, unknown options, values out of range, layers that the model lacks.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
    >>> settings = configure(model, gamma=0.8, dense_layers=(0,))
    >>> model.config.flexmask_config
    {'dense_layers': [0], 'gamma': 0.8}
    """
    config, heads = config_and_heads(unwrapped(model))
    written = apply_override(PrefillSettings(), named_settings(method, settings, **options))
    written.check_model(config, heads)
    setattr(config, CONFIG_KEY, written.to_dict())
    return written
