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
    """Use these settings, or keywords, in the whole process. Without any, keep those of the call before."""
    global _process_override
    if not isinstance(named, PrefillSettings):
        checked_settings = apply_override(PrefillSettings(), named)
        # copies, which the caller cannot change
        copies = {**vars(checked_settings), **checked_settings.options}
        named = {name: copies[name] for name in named} or _process_override
    _process_override = named


def settings_for(config: Any, named: SettingsOverride | None = None) -> PrefillSettings:
    """The defaults, those in the config, the process's and the named ones, merged in this order."""
    if isinstance(named, PrefillSettings):
        return named
    return apply_override(_with_process(cached_saved_settings(config) or default_settings()), named or {})


# the latest arguments and result of `_with_process`
_latest_merge: tuple[PrefillSettings, SettingsOverride, PrefillSettings] | None = None


def _with_process(base: PrefillSettings) -> PrefillSettings:
    """The process's settings over `base`. Returns the same object for every layer, since plans are shared by the settings' id."""
    global _latest_merge
    merge, override = _latest_merge, _process_override
    if merge is None or merge[0] is not base or merge[1] is not override:
        merge = _latest_merge = (base, override, apply_override(base, override))
    return merge[2]


def cached_saved_settings(config: Any) -> PrefillSettings | None:
    """`saved_settings` of a config, parsed again only after changes, since outside of a block every layer asks for them."""
    saved_options = getattr(config, CONFIG_KEY, None)
    if saved_options is None:
        return None
    entry = entry_of(config)
    shape = heads_by_layer(config, entry.heads)
    if entry.saved_settings is None or entry.saved_settings[:2] != (saved_options, shape):
        settings = saved_settings(config, entry.heads)
        entry.saved_settings = (copy.deepcopy(saved_options), shape, settings)
    return entry.saved_settings[2]


def config_and_heads(model: PreTrainedModel) -> tuple[Any, dict[int, int]]:
    """The model's `text_config`, and the query heads of its layers, which are kept in the config's entry."""
    config = text_config(model)
    heads = entry_of(config).heads = heads_of_layers(model)
    return config, heads


def model_settings(model: PreTrainedModel, **named: Any) -> PrefillSettings:
    """The settings of a model, checked against it; `named` as in `named_settings`."""
    config, heads = config_and_heads(model)
    settings = settings_for(config, named_settings(**named))
    settings.check_model(config, heads)
    return settings


def configure(
    model: Any, method: str | None = None, settings: PrefillSettings | str | Path | None = None, **options: Any
) -> PrefillSettings:
    """Write options into a model's config, where ``save_pretrained`` keeps them: ``flexmask_config`` in ``config.json``.

    They apply where the model runs with ``attn_implementation="flexmask"``, and in `sparse_prefill` blocks, whose keywords
    override them one by one. They replace all options that were there; without any, the defaults apply.

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
    new_settings = apply_override(PrefillSettings(), named_settings(method, settings, **options))
    new_settings.check_model(config, heads)
    setattr(config, CONFIG_KEY, new_settings.to_dict())
    return new_settings
