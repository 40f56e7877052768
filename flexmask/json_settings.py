"""Settings in JSON: keys that are unique, data of bounded size, layers by number."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

# 200 layers of 128 heads with a pair of numbers each are 77 thousand values in 6 levels
_MAX_VALUES, _MAX_LEVELS, _MAX_CHARACTERS = 2**18, 8, 256


def json_data(text: str | bytes) -> Any:
    """The data of a JSON text, in UTF-8; ValueError for other texts, and for a key that an object has twice."""
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, object_pairs_hook=each_once)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def keywords_of(saved: Any) -> dict[str, Any]:
    """The keywords of `PrefillSettings` in JSON's types, layers by number; TypeError or ValueError for other data."""
    _check_data(saved)
    if not isinstance(saved, dict):
        raise TypeError(f"must be a JSON object of options; got {type(saved).__name__}")
    keywords = dict(saved)
    if not isinstance(keywords.get("method", ""), str):
        raise TypeError(f"method must be a string; got {type(keywords['method']).__name__}")
    if isinstance(keywords.get("layers"), dict):
        by_layer = ((_layer_index(str(key)), options) for key, options in keywords["layers"].items())
        keywords["layers"] = each_once(by_layer, "layers must have each layer once")
    return keywords


def each_once(pairs: Iterable[tuple[Any, Any]], rule: str = "an object must have each key once") -> dict[Any, Any]:
    """A dict of these pairs; ValueError for a key that comes twice, of which a dict would keep the last."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{rule}; got {key!r} twice")
        found[key] = value
    return found


def _layer_index(key: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", key):
        raise ValueError(f"layers must have layer indices as keys; got {key!r}")
    return int(key)


def _check_data(saved: Any, levels: int = _MAX_LEVELS, left: list[int] | None = None) -> None:
    """Refuse what no JSON file of settings holds; `left` counts values still allowed."""
    left = [_MAX_VALUES] if left is None else left
    left[0] -= 1
    if levels == 0 or left[0] < 0:
        raise ValueError(f"must have at most {_MAX_VALUES:,} values, at most {_MAX_LEVELS} levels deep")
    for word in list(saved) if isinstance(saved, dict) else [saved]:
        if isinstance(word, str) and len(word) > _MAX_CHARACTERS:
            raise ValueError(f"must have strings of at most {_MAX_CHARACTERS} characters; got one of {len(word)}")
    if isinstance(saved, (dict, list, tuple)):
        for value in saved.values() if isinstance(saved, dict) else saved:
            _check_data(value, levels - 1, left)
    elif saved is not None and not isinstance(saved, (str, int, float)):
        raise TypeError(f"must be plain data, as JSON has it; got {type(saved).__name__}")
