"""The options that hold for a model: named ones, the process's, those that `configure` wrote into its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from flexmask.integrations.huggingface.compat import text_config, unwrapped
from flexmask.integrations.huggingface.session import configured
from flexmask.settings import CONFIG_KEY, PrefillSettings, named_settings

_of_process: PrefillSettings | None = None


def set_process_settings(settings: PrefillSettings | None) -> None:
    """Use these settings in the whole process; None leaves those that it has."""
    global _of_process
    _of_process = settings or _of_process


def settings_for(config: Any, named: PrefillSettings | None = None) -> PrefillSettings:
    """The named settings, else the process's, the config's, or the defaults."""
    return named or _of_process or configured(config) or PrefillSettings()


def model_settings(model: PreTrainedModel, **named: Any) -> PrefillSettings:
    """`settings_for` a model, checked for it; `named` as in `named_settings`."""
    config = text_config(model)
    chosen = settings_for(config, named_settings(**named))
    chosen.check_model(config)
    return chosen


def configure(
    model: Any, method: str | None = None, settings: PrefillSettings | str | Path | None = None, **options: Any
) -> PrefillSettings:
    """Write options into a model's config, where ``save_pretrained`` keeps them: ``flexmask_config`` in ``config.json``.

    They apply where the model runs with ``attn_implementation="flexmask"``, except inside a `sparse_prefill` block with its own.
    Without options the defaults replace what was there.

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
    config = text_config(unwrapped(model))
    written = named_settings(method, settings, **options) or PrefillSettings()
    written.check_model(config)
    setattr(config, CONFIG_KEY, written.to_dict())
    return written
