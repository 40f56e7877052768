"""A gamma for every head of the retriever against one for all: ``python -m bench.retriever.tune``.

Tunes on one prompt and judges on others of the same length, by what the heads lose and by answers. For every gamma of
`--gammas` the tuned settings keep as many blocks on the prompt that they were tuned on. `--write DENSITY` writes the settings of
a density into the model's config.json, where `make demo` finds them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from bench.demo import load_model
from bench.prompts.captured import MODEL
from bench.reporting.tables import text_table
from bench.retriever.answers import decode_answers, prefill
from bench.retriever.task import Prompt, make_prompt
from flexmask.integrations.huggingface import PrefillSettings, TuneResult, flexprefill, tune
from flexmask.integrations.settings import CONFIG_KEY

TUNED_ON = 1000  # seed; no other program asks for it
NEEDLES = 16


class Judged(NamedTuple):
    """Density and errors of settings on prompts that they were not tuned on."""

    density: float
    error: float
    logits: float  # mean absolute change of the logits at the prompt's end
    right: int
    asked: int


def of_settings(measured: TuneResult, settings: PrefillSettings) -> tuple[float, float]:
    """Density and mean error of some settings, from the measurements of other prompts."""
    by_gamma = {(row["layer"], row["head"], row["gamma"]): row for row in measured.rows(every_gamma=True)}
    found = []
    for layer, head in {key[:2] for key in by_gamma}:
        gamma: Any = settings.of_layer(layer).gamma
        found.append(by_gamma[layer, head, gamma[head] if isinstance(gamma, tuple) else gamma])
    density, error = (sum(row[name] for row in found) / len(found) for name in ("density", "error"))
    return density, error


def answered(model: PreTrainedModel, prompt: Prompt, settings: PrefillSettings | None) -> tuple[int, Tensor]:
    """Right answers after a prefill with `settings`, None for dense, and the logits at the prompt's end."""
    if settings is None:
        logits, cache = prefill(model, prompt)
    else:
        with flexprefill(model, config=settings):
            logits, cache = prefill(model, prompt)
    answers = decode_answers(model, prompt, logits, cache)
    return int((answers == prompt.answers).all(-1).sum()), logits.float().cpu()


def judge(
    model: PreTrainedModel, ways: dict[str, PrefillSettings], measured: TuneResult, prompts: list[Prompt]
) -> dict[str, Judged]:
    """Every way on every prompt, dense attention first."""
    with tqdm(total=len(prompts) * (len(ways) + 1), leave=False, disable=None) as bar:
        dense = []
        for prompt in prompts:
            dense.append(answered(model, prompt, None))
            bar.update()
        asked = sum(len(prompt.answers) for prompt in prompts)
        found = {"dense": Judged(1.0, 0.0, 0.0, sum(right for right, _ in dense), asked)}
        for name, settings in ways.items():
            right, changes = 0, []
            for prompt, (_, expected) in zip(prompts, dense, strict=True):
                number, logits = answered(model, prompt, settings)
                right += number
                changes.append(float((logits - expected).abs().mean()))
                bar.update()
            found[name] = Judged(*of_settings(measured, settings), sum(changes) / len(changes), right, asked)
    return found


def write(path: Path, result: TuneResult) -> None:
    """Write the settings into a config.json, as `configure` and ``save_pretrained`` do."""
    config = {**json.loads(path.read_text()), CONFIG_KEY: result.settings.to_dict()}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    print(f"{path}: density {result.density:.3f}, error {result.error:.5f}")


def main() -> None:
    """Tune, judge, print the table, write the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--selection", choices=("hybrid", "coverage"), default="hybrid")
    parser.add_argument("--gammas", default="0.8,0.9,0.95", help="gammas for all heads to compare with")
    parser.add_argument("--prompts", type=int, default=4, help="prompts to judge on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model")
    parser.add_argument("--resume", type=Path, default=Path("out"), help="folder for the measurements")
    parser.add_argument("--write", type=float, metavar="DENSITY", help="write settings into the model's config.json")
    options = parser.parse_args()
    model = load_model(options.model, options.device)
    options.resume.mkdir(parents=True, exist_ok=True)

    def measured(name: str, seeds: list[int]) -> TuneResult:
        prompts = [make_prompt(options.prompt_tokens, NEEDLES, 1, seed).token_ids for seed in seeds]
        path = options.resume / f"tune_{options.selection}_{options.prompt_tokens}_{name}.json"
        start, cpu = time.perf_counter(), time.process_time()
        result = tune(model, prompts, density=1.0, selection=options.selection, resume=path)
        seconds = (time.perf_counter() - start, time.process_time() - cpu)
        print(f"{name}: {len(seeds)} prompts in {seconds[0]:.0f} s ({seconds[1]:.0f} s of the CPU)", flush=True)
        return result

    tuned = measured("tuned on", [TUNED_ON])
    if options.write is not None:
        write(options.model / "config.json", tuned.at(density=options.write))
    if options.prompts == 0:
        return
    held_out = measured("judged on", [*range(options.prompts)])
    ways = {}
    for gamma in (float(each) for each in options.gammas.split(",")):
        density = next(kept for uniform, kept, _ in tuned.uniform if uniform == gamma)
        # below dense_below everything would run dense
        chosen = replace(tuned.at(density=density).settings, dense_below=0)
        uniform: dict[str, Any] = {"gamma": gamma, "selection": options.selection, "dense_below": 0}
        ways[f"gamma {gamma:g}"] = PrefillSettings.from_options(**uniform)
        ways[f"tuned to its density, {density:.3f}"] = chosen
    prompts = [make_prompt(options.prompt_tokens, NEEDLES, NEEDLES, seed) for seed in range(options.prompts)]
    found = judge(model, ways, held_out, prompts)
    rows = [("", "density", "error of a head's output", "logits off by", "answers right")]
    for name, each in found.items():
        right = f"{each.right} of {each.asked}"
        rows.append((name, f"{each.density:.3f}", f"{each.error:.5f}", f"{each.logits:.4f}", right))
    print(text_table(rows, "<>>>>"))


if __name__ == "__main__":
    main()
