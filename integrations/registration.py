"""The name "flexprefill" in transformers' registries of attention and of masks."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from flexmask.integrations.attention_call import attention_call
from flexmask.integrations.blocks import NAME
from flexmask.integrations.prefill_mask import prefill_mask
from flexmask.integrations.versions import check_release


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
