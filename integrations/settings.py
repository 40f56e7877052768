"""The options of one model: FlexPrefill's, by layer if wanted, and when dense attention or another method runs instead."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch.nn.attention.flex_attention import BlockMask

from flexmask.attention import MAX_MASK_BYTES, check_dense_below, check_max_mask_bytes
from flexmask.base.checks import check_int, check_word
from flexmask.block_masks import MASKS
from flexmask.config import OPTIONS, FlexPrefillConfig
from flexmask.flex.backend import BACKENDS
from flexmask.gallery import check_options

CONFIG_KEY = "flexprefill_config"


@dataclass(frozen=True)
class PrefillSettings:
    """Settings of a model's prefill; every value is checked on creation.

    Parameters
    ----------
    config
        The options of FlexPrefill, for all layers.
    layers
        By layer index: options of FlexPrefillConfig that differ there, as ``{3: {"gamma": 0.99}}`` or, with a gamma for every
        head, ``{3: {"gamma": [0.9, 1.0]}}``. Default: none.
    dense_layers
        Layer indices whose attention is dense. Default: none.
    dense_below
        Tokens, >= 0: dense attention runs below this kv_len, in layers whose sliding window is shorter, in layers whose heads are
        all at gamma 1, and in single heads as in `flexprefill_attention`. 0 switches all of this off. Default None: as there.
    backend, max_mask_bytes
        As in `flexprefill_attention`.
    method
        ``"flexprefill"`` (default), another name in `flexmask.block_masks.MASKS`, or a function of query and key with that
        registry's keywords (`block_size`, `window`, `attention_mask`, `q_offset`, and `scale` and `softcap` if it has them) that
        gives a BlockMask. Of `config` such a method gets `block_size` only.
    method_options
        Options of a `method` other than FlexPrefill, as ``{"threshold": 0.8}``. Default: none, its own defaults.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong type or out of its range.
    """

    config: FlexPrefillConfig = field(default_factory=FlexPrefillConfig)
    layers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    dense_layers: tuple[int, ...] = ()
    dense_below: int | None = None
    backend: str = "auto"
    max_mask_bytes: int = MAX_MASK_BYTES
    method: str | Callable[..., BlockMask] = "flexprefill"
    method_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.config, FlexPrefillConfig):
            raise TypeError(f"config must be a FlexPrefillConfig; got {type(self.config).__name__}")
        if not isinstance(self.layers, Mapping):
            raise TypeError(f"layers must be a dict of layer index to options; got {type(self.layers).__name__}")
        if not isinstance(self.dense_layers, (tuple, list, set, frozenset, range)):
            raise TypeError(f"dense_layers must be a tuple of layer indices; got {type(self.dense_layers).__name__}")
        for name, indices in (("layers", self.layers), ("dense_layers", self.dense_layers)):
            for index in indices:
                check_int(name, index)
                if index < 0:
                    raise ValueError(f"{name} must hold layer indices >= 0; got {index}")
        object.__setattr__(self, "dense_layers", tuple(sorted(set(self.dense_layers))))
        for index, options in self.layers.items():
            _check_options(options, OPTIONS, f"layers[{index}]")
            replace(self.config, **options)
        # what was checked, whatever becomes of the caller's dicts
        layers = {index: {name: _frozen(value) for name, value in options.items()} for index, options in self.layers.items()}
        object.__setattr__(self, "layers", layers)
        check_dense_below(self.dense_below)
        check_word("backend", self.backend, BACKENDS)
        check_max_mask_bytes(self.max_mask_bytes)
        if not callable(self.method):
            check_word("method", self.method, tuple(MASKS))
        self._check_method_options()

    def _check_method_options(self) -> None:
        if not isinstance(self.method_options, Mapping):
            raise TypeError(f"method_options must be a dict of options; got {type(self.method_options).__name__}")
        if self.method == "flexprefill" and self.method_options:
            raise TypeError(f"method_options are for other methods than FlexPrefill; got {next(iter(self.method_options))!r}")
        if self.method != "flexprefill":
            check_options(
                self.method if callable(self.method) else MASKS[self.method], self.config.block_size, self.method_options
            )
        object.__setattr__(self, "method_options", dict(self.method_options))

    @property
    def break_even(self) -> int:
        """`dense_below` with its default filled in."""
        return check_dense_below(self.dense_below)

    def of_layer(self, layer: int) -> FlexPrefillConfig:
        """The options of FlexPrefill in one layer."""
        return replace(self.config, **self.layers[layer]) if layer in self.layers else self.config

    def check_layers(self, number: int) -> None:
        """Refuse indices of layers that a model of `number` layers does not have."""
        for name, indices in (("layers", self.layers), ("dense_layers", self.dense_layers)):
            beyond = [index for index in indices if index >= number]
            if beyond:
                raise ValueError(f"{name} must hold layer indices below {number}, the model's layers; got {beyond[0]}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, in types that JSON has.

        Raises
        ------
        ValueError
            For a method that is a function: only names can be saved.
        """
        if callable(self.method):
            raise ValueError("method must be a name to be saved, of flexmask.block_masks.MASKS; got a function")
        default = PrefillSettings()
        chosen = {name: value for name in OPTIONS if (value := getattr(self.config, name)) != getattr(default.config, name)}
        saved = _for_json(chosen)
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "config" and value != getattr(default, item.name):
                saved[item.name] = value
        if self.layers:
            saved["layers"] = {str(index): _for_json(options) for index, options in self.layers.items()}
        if self.method_options:
            saved["method_options"] = dict(self.method_options)
        if self.dense_layers:
            saved["dense_layers"] = list(self.dense_layers)
        return saved

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> PrefillSettings:
        """The settings that `to_dict` made the dict of."""
        options = {**saved}
        if "layers" in options:
            options["layers"] = {int(index): each for index, each in options["layers"].items()}
        return cls.from_options(**options)

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as JSON, for `load` and for ``config=`` of `flexprefill` and `configure`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> PrefillSettings:
        """The settings that `save` wrote, or those in a model's ``config.json``.

        Raises
        ------
        OSError
            If there is no such file.
        ValueError
            If it holds something else.
        """
        return cls.parse(Path(path).read_text(encoding="utf-8"), str(path))

    @classmethod
    def parse(cls, text: str, source: str = "this text") -> PrefillSettings:
        """The settings in the text of such a file; errors name `source`."""
        try:
            saved = json.loads(text)
            if not isinstance(saved, dict):
                raise TypeError(f"got a {type(saved).__name__}")
            return cls.from_dict(saved.get(CONFIG_KEY, saved))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"settings must be a JSON object of FlexPrefill's options; {source}: {error}") from error

    @classmethod
    def from_options(
        cls, config: FlexPrefillConfig | PrefillSettings | str | Path | None = None, **options: Any
    ) -> PrefillSettings:
        """Settings from the fields of this class and of FlexPrefillConfig, side by side; or whole ones, or a file of them."""
        if isinstance(config, (str, Path)):
            config = cls.load(config)
        if isinstance(config, PrefillSettings):
            if options:
                raise ValueError(f"config must come without options of its own; got {sorted(options)} too")
            return config
        own = tuple(item.name for item in fields(cls) if item.name != "config")
        _check_options(options, (*OPTIONS, *own), "the options")
        chosen = {name: value for name, value in options.items() if name in OPTIONS}
        if config is not None and chosen:
            raise ValueError(f"config must come without options of its own; got {sorted(chosen)} too")
        rest = {name: value for name, value in options.items() if name in own}
        return cls(FlexPrefillConfig(**chosen) if config is None else config, **rest)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _for_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` as reading them back from JSON gives them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def saved_settings(config: Any) -> PrefillSettings | None:
    """The settings in a model's config, as ``config.json`` keeps them, or None."""
    saved = getattr(config, CONFIG_KEY, None)
    return None if saved is None else _parsed(json.dumps(saved, sort_keys=True))


# of every model of this process, by `register`; None: each model's own
_of_process: PrefillSettings | None = None


def use_in_process(settings: PrefillSettings | None) -> None:
    """Give every model of this process these settings, None for none."""
    global _of_process
    _of_process = settings


def process_settings() -> PrefillSettings | None:
    """The settings that `use_in_process` gave, or None."""
    return _of_process


def outside_of_blocks(config: Any) -> PrefillSettings:
    """The settings of a model that no block or hook is open on: the process's, its config's, else the defaults."""
    return _of_process or saved_settings(config) or PrefillSettings()


@functools.lru_cache(maxsize=64)
def _parsed(saved: str) -> PrefillSettings:
    return PrefillSettings.from_dict(json.loads(saved))


def _check_options(options: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    if not isinstance(options, Mapping):
        raise TypeError(f"{where} must be a dict of options; got {type(options).__name__}")
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(f"{where} must be of {', '.join(known)}; got {unknown[0]!r}")
