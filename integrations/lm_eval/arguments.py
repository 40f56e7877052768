"""Splits the harness's ``--model_args`` into flexmask's and others, and refuses unknown ones."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from flexmask.flex.backend import BACKENDS
from flexmask.selector import METHODS
from flexmask.settings import CONFIG_KEY, FIELDS, PrefillSettings

_OWN = (
    *(name for name in FIELDS if name != "backend"),
    *sorted({name for method in METHODS.values() for name in method.defaults}),
)
# what from_pretrained takes without naming it in its signature
_PLACING = ("device_map", "device_mesh", "distributed_config", "max_memory", "offload_buffers", "offload_folder", "tp_size")
_RUNNING = ("allow_all_kernels", "attn_implementation", "experts_implementation", "kernel_config", "use_kernels")
_READING = ("adapter_kwargs", "adapter_name", "code_revision", "generation_config", "key_mapping", "proxies", "state_dict")
_FORMERLY = ("low_cpu_mem_usage", "offload_state_dict", "resume_download", "torch_dtype", "use_auth_token")
_QUANTIZING = ("load_in_4bit", "load_in_8bit", "quantization_config", "variant")
_LOADING = {*_PLACING, *_RUNNING, *_READING, *_QUANTIZING, *_FORMERLY}


def split_arguments(arguments: Mapping[str, Any]) -> tuple[PrefillSettings | None, dict[str, Any]]:
    """Split the arguments of a model into flexmask's settings, None without any, and the rest.

    `settings` is a PrefillSettings, its dict, or a JSON file of that dict. Single options override it; ValueError if its layers
    hide them. The value of `backend` decides whether it is flexmask's or the harness's.
    """
    own = {name: value for name, value in arguments.items() if name in _OWN}
    if arguments.get("backend") in BACKENDS:
        own["backend"] = arguments["backend"]
    rest = {name: value for name, value in arguments.items() if name not in own and name != "settings"}
    saved = _saved(arguments.get("settings"))
    if saved is None:
        return (PrefillSettings.from_dict(own) if own else None), rest
    for index, options in dict(saved.get("layers", {})).items():
        hidden = [name for name in own if name in options and "layers" not in own]
        if hidden:
            raise ValueError(f"{hidden[0]} must not be given along with settings that hold one for layer {index}")
    return PrefillSettings.from_dict({**saved, **own}), rest


def _saved(settings: Any) -> dict[str, Any] | None:
    if settings is None:
        return None
    if isinstance(settings, (str, Path)):
        settings = PrefillSettings.load(settings)
    if isinstance(settings, PrefillSettings):
        return settings.to_dict()
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings must be a file, a dict of options or PrefillSettings; got {type(settings).__name__}")
    saved = dict(settings.get(CONFIG_KEY, settings))
    PrefillSettings.from_dict(saved)
    return saved


def check_known(names: Collection[str], known: Collection[str], config: Any) -> None:
    """Refuse names unknown to flexmask, the harness (`known`), ``from_pretrained`` and the config."""
    others = {*known, *inspect.signature(PreTrainedModel.from_pretrained).parameters, *_LOADING, "settings"}
    for name in names:
        if name in others or name.startswith("bnb_4bit_") or hasattr(config, name):
            continue
        close = difflib.get_close_matches(name, [*_OWN, *others], n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"flexmask has {', '.join(_OWN)}"
        raise TypeError(
            f"model_args must be options of flexmask, of the harness's hf model or of from_pretrained; got {name!r}: {hint}"
        )
