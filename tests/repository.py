"""The repository's root and folders, its modules outside of packages, and Python in a process of its own."""

import importlib.util
import os
import subprocess
import sys
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


def python(*arguments: str, path: Path = ROOT, executable: str = sys.executable, **environment: str) -> str:
    """Run Python in `path`, which it imports from; returns what it prints."""
    surroundings = {**os.environ, "PYTHONPATH": str(path), **environment}
    command = [executable, *arguments]
    run = subprocess.run(command, cwd=path, env=surroundings, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout
