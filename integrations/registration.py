"""The name "flexprefill" in transformers' registries of attention and of masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from flexmask.config import FlexPrefillConfig
from flexmask.integrations.attention_call import attention_call
from flexmask.integrations.blocks import NAME
from flexmask.integrations.prefill_mask import prefill_mask
from flexmask.integrations.settings import PrefillSettings, use_in_process
from flexmask.integrations.versions import check_release


def register(config: FlexPrefillConfig | PrefillSettings | str | Path | None = None, **options: Any) -> None:
    """Make ``"flexprefill"`` a name that ``set_attn_implementation`` and ``from_pretrained(attn_implementation=...)`` know.

    A model that is set to the name outside of `flexprefill` runs with what `configure` wrote into its config, else with the
    defaults.

    Parameters
    ----------
    config, options
        As in `flexprefill`. With any, every model of this process runs with these, whatever its config holds, until the next call
        with other ones; only a `flexprefill` block or a hook with options of its own has those. Default: no such settings.

    Raises
    ------
    ImportError
        With a transformers older than 4.54 or newer than 5.23.
    OSError, TypeError, ValueError
        For unknown options, values out of range, a file that is none of settings.

    Examples
    --------
    >>> register()
    """
    check_release()
    if config is not None or options:
        use_in_process(PrefillSettings.from_options(config, **options))
    AttentionInterface.register(NAME, attention_call)
    AttentionMaskInterface.register(NAME, prefill_mask)
