"""The settings of a model's prefill: as keywords, in a file, in a model's config."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.attention import RECOMMENDED
from flexmask.base.checks import check_int, plain_number, plain_numbers
from flexmask.call_options import DEFAULT_MASK_BYTES, CallOptions, checked_call_options
from flexmask.json_settings import json_data, keywords_of
from flexmask.method import Method, UnknownOption, method_of

CONFIG_KEY = "flexmask_config"
_MAX_FILE_BYTES = 2**24


@dataclass(frozen=True, init=False, repr=False)
class PrefillSettings:
    """Settings of a model's prefill, checked on creation.

    Parameters
    ----------
    method
        A name in `flexmask.METHODS`, or a function of query and key, as in `flexmask.sparse_attention`. Default ``"hybrid"``.
    block_size
        Tokens per block. Default 128.
    dense_below
        Tokens, >= 0. Attention runs dense below this kv_len, in layers with a shorter sliding window, in layers that keep every
        block, and in single heads as in `flexmask.sparse_attention`. 0 makes all of these sparse; calls of fewer rows than a
        block stay dense. Default None: as there.
    backend, max_mask_bytes
        As in `flexmask.sparse_attention`.
    layers
        Options of the method that differ in some layers, as ``{3: {"gamma": 0.99}}``. Default: none.
    dense_layers
        Indices of layers that run dense. Default: none.
    options
        Options of the method, as ``gamma=0.9``, also by name as the attribute ``options``. Options per head have one number per
        head of the whole model, also under tensor parallelism. Default: the method's.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong type or out of range, and for options that the method lacks.
    """

    method: str | Callable[..., BlockMask]
    options: Mapping[str, Any]
    block_size: int
    dense_below: int | None
    backend: str
    max_mask_bytes: int
    layers: Mapping[int, Mapping[str, Any]]
    dense_layers: tuple[int, ...]

    def __init__(
        self,
        method: str | Callable[..., BlockMask] = RECOMMENDED,
        *,
        block_size: int = 128,
        dense_below: int | None = None,
        backend: str = "auto",
        max_mask_bytes: int = DEFAULT_MASK_BYTES,
        layers: Mapping[int, Mapping[str, Any]] = {},  # copied
        dense_layers: Any = (),
        **options: Any,
    ) -> None:
        if not isinstance(layers, Mapping):
            raise TypeError(f"layers must be a dict; got {type(layers).__name__}")
        dense_layers = plain_numbers(list(dense_layers) if isinstance(dense_layers, (set, frozenset)) else dense_layers)
        if not isinstance(dense_layers, tuple):
            raise TypeError(f"dense_layers must be a tuple of layer indices; got {type(dense_layers).__name__}")
        layers = {plain_number(index): layer_options for index, layer_options in layers.items()}
        for name, indices in (("layers", layers), ("dense_layers", dense_layers)):
            for index in indices:
                check_int(f"an index in {name}", index)
                if index < 0:
                    raise ValueError(f"{name} must hold layer indices >= 0; got {index}")
        for index, layer_options in layers.items():
            if not isinstance(layer_options, Mapping):
                raise TypeError(f"layers[{index}] must be a dict of options; got {type(layer_options).__name__}")
        # copies, which the caller cannot change after the checks
        vars(self).update(
            method=method, options=_frozen(options), block_size=plain_number(block_size),
            dense_below=plain_number(dense_below), backend=backend, max_mask_bytes=plain_number(max_mask_bytes),
            layers={index: _frozen(layer_options) for index, layer_options in layers.items()},
            dense_layers=tuple(sorted(set(dense_layers))),
        )  # fmt: skip
        _ = self.call_options
        try:
            self.layer_method()
        except UnknownOption as error:
            raise error.with_names(*FIELDS) from None
        for index in self.layers:
            try:
                self.layer_method(index)
            except (TypeError, ValueError) as error:
                raise type(error)(f"layers[{index}]: {error}") from None

    @property
    def keywords(self) -> dict[str, Any]:
        """Options that differ from the defaults, and the method's options."""
        changed = {name: getattr(self, name) for name, default in _DEFAULTS.items() if getattr(self, name) != default}
        return {**changed, **self.options}

    def __repr__(self) -> str:
        return f"PrefillSettings({', '.join(f'{name}={value!r}' for name, value in self.keywords.items())})"

    def with_fields(self, **changes: Any) -> PrefillSettings:
        """The settings with other values of some keywords."""
        return PrefillSettings(**{**self.keywords, **changes})

    @functools.cached_property
    def call_options(self) -> CallOptions:
        """The checked call options; rows that do not fill a block run dense, as selecting for them costs as much as attending."""
        checked = checked_call_options(self.backend, self.dense_below, self.max_mask_bytes)
        return checked._replace(policy=checked.policy._replace(min_rows=self.block_size, dense_layers=self.dense_layers))

    def layer_method(self, layer: int | None = None) -> Method:
        """The method with its options in one layer; None: in all layers."""
        layer_options = {} if layer is None else self.layers.get(layer, {})
        return method_of(self.method, self.block_size, {**self.options, **layer_options})

    def check_model(self, config: Any, module_heads: Mapping[int, int] = {}) -> None:
        """Refuse layers that the model lacks, and options for another number of heads; arguments as of `heads_by_layer`."""
        heads = heads_by_layer(config, module_heads)
        if heads is None:
            return
        for name, indices in (("layers", self.layers), ("dense_layers", self.dense_layers)):
            for index in indices:
                if index >= len(heads):
                    raise ValueError(f"{name} must hold layer indices below {len(heads)}, the model's layers; got {index}")
        for layer, num_heads in enumerate(heads):
            if num_heads is not None and layer not in self.dense_layers:
                checked_for_heads(self.layer_method(layer), num_heads, f"layer {layer}: ")

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from the defaults, in JSON types; ValueError for a method that is a function."""
        if callable(self.method):
            raise ValueError("method must be a name to be saved, one of flexmask.METHODS; got a function")
        keywords = self.keywords
        if self.layers:
            keywords["layers"] = {str(index): options for index, options in self.layers.items()}
        saved: dict[str, Any] = json.loads(json.dumps(keywords))
        return saved

    @classmethod
    def from_dict(cls, saved: Any, source: str = "settings", other_names: tuple[str, ...] = ()) -> PrefillSettings:
        """The settings of a dict from `to_dict`; else ValueError, which begins with `source` and lists `other_names` as keys."""
        try:
            return cls(**keywords_of(saved))
        except (TypeError, ValueError) as error:
            cause = error.with_names(*other_names) if isinstance(error, UnknownOption) else error
            raise ValueError(f"{source}: {cause}") from cause

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as JSON, for `load`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> PrefillSettings:
        """The settings that `save` wrote, or those in a model's ``config.json``; OSError without a file, else ValueError."""
        path = Path(path)
        size = path.stat().st_size
        if not path.is_file():
            raise ValueError(f"settings must be a regular file; got {path}")
        if size > _MAX_FILE_BYTES:
            raise ValueError(f"settings must be a file of at most {_MAX_FILE_BYTES:,} bytes; {path} has {size:,}")
        with path.open("rb") as file:
            return cls.parse(file.read(_MAX_FILE_BYTES), str(path))

    @classmethod
    def parse(cls, text: str | bytes, source: str = "settings") -> PrefillSettings:
        """The settings in the text of a file that `save` wrote, or of a ``config.json``."""
        try:
            saved = json_data(text)
        except ValueError as error:
            raise ValueError(f"{source}: must be a JSON object in UTF-8; {error}") from error
        config = _config_with_settings(saved)
        return cls.from_dict(saved, source) if config is None else cls.from_dict(config[CONFIG_KEY], f"{source}: {CONFIG_KEY}")


_PARAMETERS = inspect.signature(PrefillSettings).parameters.values()
_DEFAULTS = {parameter.name: parameter.default for parameter in _PARAMETERS if parameter.kind is not parameter.VAR_KEYWORD}
FIELDS = tuple(_DEFAULTS)  # the keywords of PrefillSettings that are no options of a method


def heads_by_layer(config: Any, module_heads: Mapping[int, int]) -> tuple[int | None, ...] | None:
    """Number of query heads of each layer, None where it is unknown; None if the config has no number of layers.

    `module_heads` has the heads of a model's modules by layer. They override the config's, from which some models differ.
    """
    num_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        return None
    # a config whose layers differ in a value refuses to be asked for it; its layers' configs answer
    layer_configs = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * num_layers
    heads = getattr(config, "num_attention_heads_per_layer", None)
    heads = heads or [getattr(layer_config, "num_attention_heads", None) for layer_config in layer_configs]
    heads = [each[layer] if isinstance(each, (list, tuple)) else each for layer, each in enumerate(heads)]
    return tuple(module_heads.get(layer, heads[layer]) for layer in range(num_layers))


def _config_with_settings(data: Any) -> dict[str, Any] | None:
    """The part of a ``config.json`` that has settings; a model of several parts may have them in its text model's config."""
    if not isinstance(data, dict):
        return None
    return data if CONFIG_KEY in data else next(filter(None, map(_config_with_settings, data.values())), None)


def _frozen(options: Mapping[str, Any]) -> dict[str, Any]:
    def frozen(value: Any) -> Any:
        value = plain_numbers(value.tolist() if isinstance(value, Tensor) else value)
        return tuple(map(frozen, value)) if isinstance(value, tuple) else value

    return {name: frozen(value) for name, value in options.items()}


def checked_for_heads(method: Method, num_heads: int, where: str = "") -> Method:
    """The method with its options per head checked for so many heads; an error's message begins with `where`."""
    try:
        return method.with_options_by_head(torch.empty(()).expand(1, num_heads, 1, 1))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}{error}") from None


# what a caller sets: whole settings, or keywords, which are not checked yet
SettingsOverride = PrefillSettings | Mapping[str, Any]


def named_settings(
    method: str | Callable[..., BlockMask] | None = None, settings: PrefillSettings | str | Path | None = None, **options: Any
) -> SettingsOverride:
    """Gather a caller's settings: whole `settings`, an object or a file, or keywords, which are not checked yet."""
    if settings is None:
        return options if method is None else {"method": method, **options}
    if method is not None or options:
        also = sorted({*options, *([] if method is None else ["method"])})
        raise ValueError(f"settings cannot be combined with a method or options; got {also}")
    if isinstance(settings, (str, Path)):
        return PrefillSettings.load(settings)
    if not isinstance(settings, PrefillSettings):
        raise TypeError(f"settings must be PrefillSettings or a file of them; got {type(settings).__name__}")
    return settings


def apply_override(base: PrefillSettings, override: SettingsOverride, base_name: str = "") -> PrefillSettings:
    """`base` with `override` applied: whole settings replace it, and each keyword replaces its own.

    An option in `override` holds for all layers, and another method drops the options of the old one. Raises ValueError if that
    drops something of `base` while `base_name` is given, TypeError or ValueError for wrong keywords.
    """
    if isinstance(override, PrefillSettings):
        return override
    if not override:
        return base
    layers = {} if "layers" in override else base.layers
    kept = {layer: {name: value for name, value in options.items() if name not in override} for layer, options in layers.items()}
    conflict = next(((name, layer) for layer, options in layers.items() for name in options if name in override), None)
    if base_name and conflict is not None:
        name, layer = conflict
        raise ValueError(f"{name} cannot override {name} of layer {layer} in {base_name}; name whole settings instead")
    keywords = {**base.keywords, "layers": {layer: options for layer, options in kept.items() if options}}
    if override.get("method", base.method) != base.method:
        lost = [*(name for name in base.options if name not in override), *(["layers"] if layers else [])]
        if base_name and lost:
            dropped = f"whose {', '.join(lost)} it would drop"
            raise ValueError(f"method cannot override {base.method!r} in {base_name}, {dropped}; name whole settings instead")
        keywords = {name: value for name, value in keywords.items() if name in FIELDS and name != "layers"}
    return PrefillSettings(**{**keywords, **override})


def saved_settings(config: Any, module_heads: Mapping[int, int] = {}) -> PrefillSettings | None:
    """The settings in a model's config, or None; ValueError if they do not fit the model. Arguments as of `heads_by_layer`."""
    saved = getattr(config, CONFIG_KEY, None)
    if saved is None:
        return None
    settings = PrefillSettings.from_dict(saved, CONFIG_KEY)
    try:
        settings.check_model(config, module_heads)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{CONFIG_KEY}: {error}") from None
    return settings


default_settings = functools.cache(PrefillSettings)
