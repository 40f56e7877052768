"""Texts for language modelling: token ids of ``texts.npz``, or of a folder.

``texts.npz`` holds pieces of 16,384 SmolLM2 tokens by name (``test/prose/lcet10-2``: third piece), six "tune" and twelve
"test". Prose: test data of ``brotli`` 1.2.1's source distribution (Project Gutenberg, public domain). Python: CPython 3.11.7
(PSF licence: argparse, turtle, inspect, tarfile, typing, _pydecimal), matplotlib (its licence: axes/_axes.py), transformers
(Apache-2.0: generation/utils.py), networkx (BSD: algorithms/shortest_paths/weighted.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.fidelity import smollm

PATH = Path(__file__).parent / "texts.npz"


def load(use: str) -> dict[str, np.ndarray]:
    """Token ids of the "tune" or "test" texts by name, prose and sources in turn."""
    with np.load(PATH) as file:
        texts = {name: file[name].astype(np.int64) for name in file.files if name.startswith(use)}
    kinds: dict[str, list[str]] = {"prose": [], "python": []}
    for name in texts:
        kinds[name.split("/")[1]].append(name)
    return {name: texts[name] for pair in zip(*kinds.values(), strict=True) for name in pair}


def read(path: Path, model: Path | None = None) -> dict[str, Tensor]:
    """Token ids by name: the "test" texts of an npz file, or a folder's ``.npy`` files of ids (recursive) and ``.txt`` files."""
    if path.suffix == ".npz":
        return {name: torch.from_numpy(ids) for name, ids in load("test").items()}
    found = {
        str(file.relative_to(path).with_suffix("")): torch.from_numpy(np.load(file).astype(np.int64))
        for file in sorted(path.rglob("*.npy"))
    }
    files = sorted(path.glob("*.txt"))
    tokenizer = smollm.tokenizer(model) if files else None
    for file in files:
        assert tokenizer is not None
        found[file.stem] = torch.tensor(tokenizer(file.read_text(encoding="utf-8")).input_ids)
    if not found:
        raise SystemExit(f"--texts: no .npy or .txt in {path}")
    return found
