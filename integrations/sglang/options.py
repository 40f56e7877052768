"""The options of the plug-in: one JSON object in the environment variable FLEXMASK_SGLANG, or the model's config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flexmask.integrations.serving.options import ServingOptions, read_options
from flexmask.json_settings import json_data

VARIABLE = "FLEXMASK_SGLANG"
# SGLang's backends that were tested as the stock one: the first two on GPUs, the last on CPUs
KERNELS = ("fa3", "triton", "torch_native")


def stock_kernel(decoding: str, device: str) -> str:
    """The default name of the stock backend: that of the decode backend if it is in `KERNELS`."""
    if decoding in KERNELS:
        return decoding
    return "torch_native" if device == "cpu" else "triton"


def serving_options(kernel: str, model_config: Any = None) -> ServingOptions:
    """Read the options in the variable, JSON or the path of a JSON file; they may replace the stock `kernel`."""
    return read_options(_parsed(os.environ.get(VARIABLE, "")), VARIABLE, VARIABLE, KERNELS, kernel, model_config)


def _parsed(text: str) -> Any:
    text = text.strip()
    if not text:
        return None
    expected = f"{VARIABLE} must be a JSON object or the path of a file with one"
    try:
        return json_data(text if text[0] in "{[" else Path(text).read_bytes())
    except OSError as error:
        raise ValueError(f"{expected}; got {text!r}") from error
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from None
