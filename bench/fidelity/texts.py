"""Make ``texts.npz``: token ids of long texts, six for choosing settings and twelve to test them on.

``python -m bench.fidelity.texts --tokenizer FOLDER --brotli FOLDER --stdlib FOLDER --packages FOLDER``. The prose is in the test
data of the source distribution of ``brotli`` 1.2.1 (from Project Gutenberg, public domain), the sources are CPython 3.11.7's
(PSF licence), matplotlib's (its licence), transformers' (Apache-2.0) and networkx's (BSD). The file holds token ids only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.fidelity import smollm

NUM_TOKENS = 16384
PATH = Path(__file__).parent / "texts.npz"


class Source(NamedTuple):
    """A file and which pieces of `NUM_TOKENS` tokens are taken from it."""

    use: str  # "tune" or "test"
    kind: str  # "prose" or "python"
    folder: str  # argument that names where it lies
    file: str
    pieces: tuple[int, ...]


SOURCES = (
    Source("tune", "prose", "brotli", "tests/testdata/asyoulik.txt", (0,)),
    Source("tune", "prose", "brotli", "tests/testdata/alice29.txt", (0, 1)),
    Source("tune", "python", "stdlib", "argparse.py", (0,)),
    Source("tune", "python", "stdlib", "turtle.py", (0,)),
    Source("tune", "python", "stdlib", "inspect.py", (0,)),
    Source("test", "prose", "brotli", "tests/testdata/lcet10.txt", (0, 2, 4)),
    Source("test", "prose", "brotli", "tests/testdata/plrabn12.txt", (1, 3, 5)),
    Source("test", "python", "stdlib", "tarfile.py", (0,)),
    Source("test", "python", "stdlib", "typing.py", (0,)),
    Source("test", "python", "stdlib", "_pydecimal.py", (1,)),
    Source("test", "python", "packages", "matplotlib/axes/_axes.py", (0,)),
    Source("test", "python", "packages", "transformers/generation/utils.py", (0,)),
    Source("test", "python", "packages", "networkx/algorithms/shortest_paths/weighted.py", (0,)),
)


def load(use: str) -> dict[str, np.ndarray]:
    """Token ids of the texts for "tune" or "test" by name, prose and sources in turn."""
    with np.load(PATH) as file:
        texts = {name: file[name].astype(np.int64) for name in file.files if name.startswith(use)}
    kinds: dict[str, list[str]] = {"prose": [], "python": []}
    for name in texts:
        kinds[name.split("/")[1]].append(name)
    return {name: texts[name] for pair in zip(*kinds.values(), strict=True) for name in pair}


def read(path: Path, model: Path | None = None) -> dict[str, Tensor]:
    """Token ids of texts by name.

    Parameters
    ----------
    path
        This module's file, of which the texts to test on are taken; or a folder with files of ids (``.npy``) and of text
        (``.txt``, read by the tokenizer of `model`, see `bench.fidelity.smollm`).
    """
    if path.suffix == ".npz":
        return {name: torch.from_numpy(ids) for name, ids in load("test").items()}
    found = {file.stem: torch.from_numpy(np.load(file).astype(np.int64)) for file in sorted(path.glob("*.npy"))}
    files = sorted(path.glob("*.txt"))
    tokenizer = smollm.tokenizer(model) if files else None
    for file in files:
        assert tokenizer is not None
        found[file.stem] = torch.tensor(tokenizer(file.read_text(encoding="utf-8")).input_ids)
    if not found:
        raise SystemExit(f"--texts: no .npy or .txt in {path}")
    return found


def main() -> None:
    """Tokenise the sources."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for folder in ("tokenizer", "brotli", "stdlib", "packages"):
        parser.add_argument(f"--{folder}", type=Path, required=True)
    options = vars(parser.parse_args())
    tokenizer = AutoTokenizer.from_pretrained(options["tokenizer"])
    texts = {}
    for source in SOURCES:
        text = (options[source.folder] / source.file).read_text("utf-8", errors="replace")
        if source.kind == "prose":  # margins, and spaces at ends of lines
            text = "\n".join(line.strip() for line in text.splitlines())
        ids = tokenizer(text).input_ids
        for piece in source.pieces:
            part = ids[piece * NUM_TOKENS : (piece + 1) * NUM_TOKENS]
            if len(part) < NUM_TOKENS:
                raise ValueError(f"{source.file} has {len(ids)} tokens, too few for piece {piece}")
            texts[f"{source.use}/{source.kind}/{Path(source.file).stem}-{piece}"] = np.array(part, dtype=np.uint16)
    np.savez_compressed(PATH, **texts)  # type: ignore[arg-type]  # names of texts, none is an option's
    print(f"{PATH}: {len(texts)} texts, {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
