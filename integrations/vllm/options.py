"""The options of the plug-in: ``additional_config["flexmask"]``, or the model's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexmask.integrations.serving.options import ServingOptions, read_options

KEY = "flexmask"
KERNELS = ("FLASH_ATTN", "TRITON_ATTN")  # vLLM's backends for everything that is not sparse; the first is the default


def serving_options(additional_config: Any, model_config: Any = None) -> ServingOptions:
    """Read the options in ``additional_config["flexmask"]``; there are none if additional_config is not a dict."""
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    return read_options(given, f"additional_config[{KEY!r}]", "additional_config", KERNELS, KERNELS[0], model_config)
