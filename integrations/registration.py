"""The name "flexprefill" in transformers' registries of attention and of masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from flexmask.base.checks import check_word
from flexmask.config import FlexPrefillConfig
from flexmask.integrations.attention_call import attention_call
from flexmask.integrations.blocks import NAME
from flexmask.integrations.prefill_mask import prefill_mask
from flexmask.integrations.settings import PrefillSettings, use_in_process
from flexmask.integrations.versions import check_release

_NAMES = (NAME, "flex_attention")


def register(config: FlexPrefillConfig | PrefillSettings | str | Path | None = None, *, name: str = NAME, **options: Any) -> None:
    """Make ``"flexprefill"`` a name that ``set_attn_implementation`` and ``from_pretrained(attn_implementation=...)`` know.

    A model that is set to the name outside of `flexprefill` runs with what `configure` wrote into its config, else with the
    defaults.

    Parameters
    ----------
    config, options
        As in `flexprefill`. With any, every model of this process runs with these, whatever its config holds, until the next call
        with other ones; only a `flexprefill` block or a hook with options of its own has those. Default: no such settings.

    name
        ``"flex_attention"`` puts FlexPrefill behind that name too, for every model of the process: for programs that let through
        only names that they know. Where the program is yours, `hook_flex_attention` does it for one model. Default
        ``"flexprefill"``.

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
    check_word("name", name, _NAMES)
    if config is not None or options:
        use_in_process(PrefillSettings.from_options(config, **options))
    for each in {NAME, name}:
        AttentionInterface.register(each, attention_call)
        AttentionMaskInterface.register(each, prefill_mask)
