"""The model and the prompts that a command line names, on which an engine is measured."""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from pathlib import Path

from bench.fidelity.texts import read
from bench.prompts.models import SHAPES, shape_config
from bench.speed import random_blocks as random_blocks  # registers its method


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that `model_folder` and `prompts` read."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder of a model")
    which.add_argument("--shape", choices=sorted(SHAPES), help="this model's shape, with random weights")
    parser.add_argument("--layers", type=int, help="with --shape: fewer layers than the model has")
    parser.add_argument("--texts", type=Path, help="with --model: prompts are the beginnings of these texts")


def model_folder(options: argparse.Namespace) -> str:
    """The model's folder; of a shape one with a config in its family's own form, for ``load_format="dummy"``."""
    if not options.shape:
        return str(options.model)
    folder = tempfile.mkdtemp()
    config = shape_config(options.shape, options.layers)
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    return folder


def prompts(options: argparse.Namespace, tokens: int, number: int) -> list[list[int]]:
    """Return `number` different prompts: beginnings of texts, or needles for a model and random tokens for a shape."""
    if options.texts:
        texts = itertools.cycle(read(options.texts, Path(options.model)).values())
        return [ids[:tokens].tolist() for ids in itertools.islice(texts, number)]
    if options.model:
        from bench.retriever.task import make_prompt

        return [make_prompt(tokens, 16, 1, seed).token_ids.tolist() for seed in range(number)]
    vocabulary = SHAPES[options.shape]["vocab_size"]
    return [random.Random(seed).choices(range(1000, vocabulary), k=tokens) for seed in range(number)]
