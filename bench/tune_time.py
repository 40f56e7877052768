"""Time and memory of `tune`: ``python -m bench.tune_time --shape llama-3.1-8b --prompt-tokens 65536``.

``--shape`` takes a known model's shape with random weights, whose gammas mean nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

from bench.prompts.models import SHAPES, load, prompt_ids
from flexmask.integrations.huggingface import tune


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder or name of a model that transformers can load")
    which.add_argument("--shape", choices=sorted(SHAPES), help="this model's shape, with random weights")
    parser.add_argument("--prompt-tokens", type=int, default=65536)
    parser.add_argument("--text", help="file whose first tokens are the prompt; default: seeded random tokens")
    parser.add_argument("--selection", choices=("hybrid", "coverage"), default="hybrid")
    parser.add_argument("--layers", type=int, help="with --shape: fewer layers than the model has")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    options.tensor_parallel = False
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune once, compilation included, and print seconds, peak memory and the errors of one gamma for all heads."""
    options = parse(arguments)
    model = load(options)
    device = model.device
    ids = prompt_ids(options, options.prompt_tokens, model.config.vocab_size).to(device)
    weights = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    start = time.perf_counter()  # tune itself waits for the device after every layer
    result = tune(model, ids, density=1.0, selection=options.selection)
    print(f"{options.prompt_tokens:,} tokens, {model.config.num_hidden_layers} layers: {time.perf_counter() - start:.1f} s")
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        print(f"peak memory {peak / 1e9:.1f} GB, {weights / 1e9:.1f} GB of it weights")
    for gamma, density, error in result.uniform:
        print(f"gamma {gamma:<5g}  density {density:.3f}  error {error:.5f}")


if __name__ == "__main__":
    main()
