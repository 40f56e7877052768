"""The repository's root, and its folders that are installed inside flexmask."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIDE_FOLDERS = ("block_masks", "integrations")
