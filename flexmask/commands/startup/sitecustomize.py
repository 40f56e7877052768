"""Registers "flexmask" with transformers in a Python that starts with this folder on PYTHONPATH, as ``flexmask run`` puts it.

FLEXMASK_SETTINGS, a JSON object or a file of one, sets every model's settings, FLEXMASK_NAME another name.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_SETTINGS, _NAME = "FLEXMASK_SETTINGS", "FLEXMASK_NAME"
_AWAITED = "transformers.modeling_utils"


class _RegisterAfterImport:
    """Registers the name when the outermost import of transformers or flexmask has ended, when neither is half imported."""

    def __init__(self) -> None:
        self.imports = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The other finders' spec, its loader watched."""
        if name.partition(".")[0] not in ("transformers", "flexmask"):
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            before = getattr(self.imports, "open", 0)
            try:
                self.imports.open = before + 1
                run(module)
            finally:
                self.imports.open = before
            if self.imports.open == 0 and _AWAITED in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        loader.exec_module = exec_module


def _register() -> None:
    """Register the name; if that fails, the program continues without."""
    try:
        _import_own_flexmask()
        from flexmask.integrations.huggingface import PrefillSettings, register

        given, name = os.environ.get(_SETTINGS, ""), os.environ.get(_NAME) or "flexmask"
        is_json = given.lstrip().startswith("{")
        register(settings=PrefillSettings.parse(given, _SETTINGS) if is_json else given or None, name=name)
    except Exception as error:
        print(f'flexmask: "flexmask" is not registered: {type(error).__name__}: {error}', file=sys.stderr)


def _import_own_flexmask() -> None:
    """Import the package of this file, whatever is installed."""
    folder = _HERE.parents[1]
    if "flexmask" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "flexmask", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["flexmask"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _run_next() -> None:
    """Run the `sitecustomize` that this one hides."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _RegisterAfterImport())
_run_next()
