"""A Python file with methods of your own, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(path: str) -> ModuleType:
    """Run the file; ValueError where there is none."""
    spec = importlib.util.spec_from_file_location(f"method_file_{Path(path).stem}", path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise ValueError(f"a method's file must be a Python file that is there; got {path}")
    # dataclasses look their module up
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
