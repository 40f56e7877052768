"""Find the settings that hold: those that a caller names, those in a model's config, or the defaults."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch.nn.attention.flex_attention import BlockMask

from flexmask.settings import CONFIG_KEY, PrefillSettings, shape_of


def named_settings(
    method: str | Callable[..., BlockMask] | None = None, settings: PrefillSettings | str | Path | None = None, **options: Any
) -> PrefillSettings | None:
    """The settings that a caller names, by keywords, as a whole or by file; None without any."""
    if settings is None:
        keywords = options if method is None else {"method": method, **options}
        return PrefillSettings(**keywords) if keywords else None
    if method is not None or options:
        also = sorted({*options, *([] if method is None else ["method"])})
        raise ValueError(f"settings must come without a method and options beside them; got {also} too")
    if isinstance(settings, (str, Path)):
        return PrefillSettings.load(settings)
    if not isinstance(settings, PrefillSettings):
        raise TypeError(f"settings must be PrefillSettings or a file of them; got {type(settings).__name__}")
    return settings


class _Parsed(NamedTuple):
    """Settings, with what they were made of."""

    saved: Any  # the config's own object, which an entry keeps alive
    copy: Any
    shape: tuple[Any, ...]
    settings: PrefillSettings


# by id of the object in a config, for calls without a block, which read the config in every layer
_PARSED: dict[int, _Parsed] = {}
_MOST_PARSED = 64


def saved_settings(config: Any) -> PrefillSettings | None:
    """The settings in a model's config; ValueError if they do not fit the model."""
    saved, shape = getattr(config, CONFIG_KEY, None), shape_of(config)
    if saved is None:
        return None
    known = _PARSED.get(id(saved))
    if known is not None and known.saved is saved and known.copy == saved and known.shape == shape:
        return known.settings
    settings = PrefillSettings.from_dict(saved, CONFIG_KEY)
    try:
        settings.check_model(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{CONFIG_KEY}: {error}") from None
    if len(_PARSED) >= _MOST_PARSED:
        _PARSED.clear()
    _PARSED[id(saved)] = _Parsed(saved, copy.deepcopy(saved), shape, settings)
    return settings


def found_settings(
    named: PrefillSettings | None, *configs: Any, saved: Callable[[Any], PrefillSettings | None] = saved_settings
) -> tuple[PrefillSettings, str]:
    """The named settings, else those that `saved` reads in the first config with some, else the defaults; and which they are."""
    if named is not None:
        return named, "named"
    of_config = next((settings for settings in map(saved, configs) if settings is not None), None)
    return (PrefillSettings(), "defaults") if of_config is None else (of_config, "config")
