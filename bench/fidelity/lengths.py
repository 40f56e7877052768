"""Language modelling by length and position: ``python -m bench.fidelity.lengths --out FILE.csv``.

A row holds the mean absolute change of a token's log-probability against dense attention, the change of the loss, and the kept
share of the causal blocks, over the prompt and between two of `POSITIONS`. Default model: SmolLM2-135M, YaRN factor 8, whose
dense loss is flat up to 64k tokens. The same command resumes. ``--lengths 2048`` runs on a CPU. A method that was edited keeps
its rows: give it another name, or another file.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.fidelity import settings, smollm, texts
from bench.fidelity.settings import Setting
from bench.fidelity.sparse_model import SparseModel
from bench.rows import Sheet

# tokens; figures by position are between neighbours
POSITIONS = (0, 4096, 8192, 16384, 32768, 65536)
FIGURES = ("density", "abs_d", "d_loss")
IDENTITY = ("model", "yarn", "text", "length", "method", "options", "chunk")


def ranges() -> dict[str, tuple[int, int]]:
    """Ranges of positions by name: ``4-8k``."""
    names = [f"{position // 1024}" if position % 1024 == 0 else f"{position / 1024:g}" for position in POSITIONS]
    return {f"{names[i]}-{names[i + 1]}k": pair for i, pair in enumerate(itertools.pairwise(POSITIONS))}


def columns() -> list[str]:
    by_position = [f"{figure} {name}" for name in ranges() for figure in FIGURES]
    return [*IDENTITY, *FIGURES, "dense_loss", "seconds", "device", "torch", *by_position]


def figures(model: SparseModel, dense: Tensor, change: Tensor, block_size: int) -> dict[str, float]:
    """Figures of one prefill; `change` holds the change of each log-probability, `dense` the dense ones."""
    found = {"density": model.density(), "abs_d": change.abs().mean().item(), "d_loss": -change.mean().item()}
    found["dense_loss"] = -dense.mean().item()
    for name, (first, end) in ranges().items():
        part = change[first:end]
        if len(part):
            found[f"density {name}"] = model.density(first // block_size, end // block_size)
            found |= {f"abs_d {name}": part.abs().mean().item(), f"d_loss {name}": -part.mean().item()}
    return found


def measure(
    model: SparseModel, prompts: dict[str, Tensor], chosen: Sequence[Setting], lengths: Sequence[int], options: Any, sheet: Sheet
) -> None:
    """Every setting on the beginning of every text, short lengths first."""
    stop = time.monotonic() + 60 * options.minutes
    on_gpu = model.model.device.type == "cuda"
    where = {"device": torch.cuda.get_device_name() if on_gpu else "CPU", "torch": torch.__version__}
    failed = set()
    for length, (text, ids) in itertools.product(lengths, prompts.items()):
        if len(ids) < length:
            print(f"{text} has {len(ids):,} tokens: left out at {length:,}", flush=True)
            continue
        row: dict[str, Any] = {"model": options.name, "yarn": options.yarn, "text": text, "length": length}
        row["chunk"] = options.chunk
        missing = [each for each in chosen if not sheet.has(**row, method=each.method, options=each.options)]
        for setting in chosen:
            if setting not in missing:
                print(f"{text}, {length:,} tokens, {setting}: known, not measured again", flush=True)
        if not missing:
            continue
        with model.attending(None):
            dense = model.log_probs(ids[:length])
        print(f"{text}, {length:,} tokens, dense loss {-dense.mean().item():.3f}", flush=True)
        for setting in missing:
            if time.monotonic() > stop:
                print("out of time; the same command goes on", flush=True)
                return
            if (setting.method, length) in failed:
                continue
            start = time.monotonic()
            try:
                with model.attending(setting):
                    change = model.log_probs(ids[:length], options.chunk) - dense
                found = figures(model, dense, change, setting.layer_method().block_size)
            except Exception as error:  # one method that fails must not end the run
                print(f"FAILED {setting}, {length:,} tokens: {error!r}"[:600], flush=True)
                failed.add((setting.method, length))
                continue
            seconds = round(time.monotonic() - start, 3)
            sheet.add(**row, method=setting.method, options=setting.options, **found, seconds=seconds, **where)
            print(f"  {setting}: density {found['density']:.1%}, |Δ log p| {found['abs_d']:.3f}, {seconds:.1f} s", flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--texts", type=Path, default=texts.PATH, help="folder of .npy files (token ids) and .txt files, or a .npz"
    )
    parser.add_argument("--out", type=Path, required=True, help="CSV file that rows are added to")
    parser.add_argument("--lengths", default="8192,16384,32768,65536", help="tokens, multiples of 128")
    parser.add_argument("--chunk", type=int, help="prefill in chunks of so many tokens, a multiple of 128")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new measurement after that (60)")
    settings.add_arguments(parser)
    parser.add_argument("--name", help=f"the model's in the rows; none: that of --model's folder, {smollm.NAME} without --model")
    smollm.add_arguments(parser, yarn=8.0)
    options = parser.parse_args(arguments)
    options.name = options.name if options.name is not None else smollm.name_of(options.model)
    if not options.name.strip():
        parser.error(f"--name must be the model's in the rows, as {options.model} says none")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    chosen, lengths = settings.chosen(options), [int(length) for length in options.lengths.split(",")]
    sheet = Sheet(options.out, columns(), IDENTITY)
    model = smollm.of_arguments(options)
    prompts = {name: ids.to(model.device) for name, ids in texts.read(options.texts, options.model).items()}
    measure(SparseModel(model), prompts, chosen, lengths, options, sheet)


if __name__ == "__main__":
    main()
