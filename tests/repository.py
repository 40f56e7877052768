"""The repository's root, its folders that are installed inside flexmask, and its modules outside of packages."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
SIDE_FOLDERS = ("block_masks", "integrations")


def module_of(path: Path) -> ModuleType:
    """Load a file that no package holds."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
