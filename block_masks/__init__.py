"""Mask generators, one method per file. Importing this package fills the table of methods."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

# every file of this folder is a method: a new one needs no line here
_NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
__all__ = [f"{name}_mask" for name in _NAMES]
for _name in _NAMES:
    globals()[f"{_name}_mask"] = getattr(import_module(f"flexmask.block_masks.{_name}"), f"{_name}_mask")


def __getattr__(name: str) -> Any:
    raise AttributeError(f"flexmask.block_masks has no {name!r}; it has {', '.join(__all__)}")
