"""Dense attention and FlexPrefill on a trained model: ``python -m bench.demo``, or ``make demo``.

The model reads a long prompt with needles in it and answers questions about them, once after a dense prefill, once after a
sparse one, and once after a sparse one with the settings in its config, where it has some: the retriever holds those that
``python -m bench.retriever.tune`` found, a gamma for every head. Prints one table and draws the masks of two heads.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.prompts.captured import MODEL
from bench.reporting.tables import text_table
from bench.retriever.answers import decode_answers, prefill
from bench.retriever.task import Prompt, make_prompt
from flexmask import FlexPrefillConfig, FlexPrefillStats
from flexmask.integrations.huggingface import FlexPrefillRun, flexprefill
from flexmask.integrations.settings import CONFIG_KEY, PrefillSettings
from flexmask.plot import plot_block_mask

MOST_QUESTIONS = 16
# times that all prefills are run again, in turns: one that something else on the machine slowed down does not count
ROUNDS = 3
Block = Callable[[], AbstractContextManager[FlexPrefillRun]]
"""Opens a block in which the model's attention is of one kind"""
DENSE, PICTURED = "dense attention", "FlexPrefill"
DEFAULTS = FlexPrefillConfig()


@dataclass(frozen=True)
class Measured:
    """Results with one kind of attention.

    Attributes
    ----------
    logits : Tensor, (vocab_size,)
        At the end of the prompt, float32 on the CPU.
    right, asked : int
        Right answers, and questions.
    first, later : float
        Seconds of the first prefill, which may include compilation, and the median of later ones, NaN until they were timed.
    """

    logits: Tensor
    right: int
    asked: int
    first: float
    later: float = math.nan


def load_model(path: Path, device: str) -> PreTrainedModel:
    """Load the model, in bfloat16 except on CPUs, where float32 is faster; its dense attention is SDPA.

    Raises
    ------
    FileNotFoundError
        If there is no model at `path`.
    """
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"no model at {path}; train one with: python -m bench.retriever.train --out DIR")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    transformers.utils.logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    model: PreTrainedModel = loaded.to(device).eval()
    return model


@dataclass(frozen=True)
class Way:
    """A sparse prefill: what was measured, and the statistics of one prefill by layer."""

    measured: Measured
    stats: Sequence[FlexPrefillStats]


def measure(
    model: PreTrainedModel, prompt: Prompt, name: str, block: Block, chunk: int | None, bar: tqdm
) -> tuple[Measured, FlexPrefillRun]:
    """Prefill and answer inside a block; only FlexPrefill's own keeps its masks, for the picture."""
    with block() as run:
        run.collect_masks = name == PICTURED
        bar.set_description(f"{name}: first prefill")
        start = time.perf_counter()
        logits, cache = prefill(model, prompt, chunk)
        logits = logits.float().cpu()  # waits for the device
        seconds = time.perf_counter() - start
        bar.update()
        bar.set_description(f"{name}: answers")
        answers = decode_answers(model, prompt, logits, cache)
        bar.update()
    right = int((answers == prompt.answers).all(-1).sum())
    return Measured(logits, right, len(prompt.answers), seconds), run


def later_prefills(
    model: PreTrainedModel, prompt: Prompt, blocks: Mapping[str, Block], chunk: int | None, bar: tqdm
) -> dict[str, float]:
    """Prefill inside each block in turn, `ROUNDS` times; return the medians in seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(ROUNDS):
        for name, block in blocks.items():
            bar.set_description(f"{name}: another prefill")
            with block():
                start = time.perf_counter()
                prefill(model, prompt, chunk)[0].float().cpu()
                seconds[name].append(time.perf_counter() - start)
            bar.update()
    return {name: statistics.median(each) for name, each in seconds.items()}


def table(dense: Measured, ways: Mapping[str, Way]) -> str:
    """Format the table, a column a way."""
    measured = [way.measured for way in ways.values()]
    differences = [f"{(dense.logits - each.logits).abs().max().item():.2g}" for each in measured]
    largest = dense.logits.abs().max().item()
    rows = [
        ("", "dense (SDPA)", *ways, ""),
        ("answers right", *(f"{each.right} of {each.asked}" for each in (dense, *measured)), "greedy, all four tokens"),
        ("largest logit difference", "", *differences, f"at the prompt's end; the largest logit is {largest:.3g}"),
        (
            "prefill, first call",
            *(f"{each.first:.2f} s" for each in (dense, *measured)),
            "FlexPrefill's includes compilation and the picture's masks",
        ),
        ("prefill, later calls", *(duration(each.later) for each in (dense, *measured)), f"median of {ROUNDS}; the whole model"),
    ]
    for layer, by_way in enumerate(zip(*(way.stats for way in ways.values()), strict=True)):
        found = [
            said for name, stats in zip(ways, by_way, strict=True) if (said := heads_of(stats, name if len(ways) > 1 else ""))
        ]
        densities = [f"{stats.density.mean():.1%}" for stats in by_way]
        rows.append((f"blocks kept, layer {layer}", "100.0%", *densities, "; ".join(found)))
    return text_table(rows, "<>" + ">" * len(ways) + "<")


def heads_of(stats: FlexPrefillStats, name: str) -> str:
    """The kinds of heads in one layer, and those that run dense; `name` says whose they are."""
    prefix = f"{name}: " if name else ""
    if stats.dense:
        return prefix + "ran dense: a short prompt"
    parts = []
    # hybrid selection knows no kinds
    if stats.row_coverage.isnan().all():
        query_aware, heads = int(stats.is_query_aware.sum()), stats.is_query_aware.numel()
        parts.append(f"{query_aware} query-aware, {heads - query_aware} vertical-slash")
    if stats.is_dense.any():
        parts.append(f"{int(stats.is_dense.sum())} heads run dense, which is faster")
    return prefix + ", ".join(parts) if parts else ""


def duration(seconds: float) -> str:
    """Format seconds, as milliseconds below one second."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def verdict(dense: Measured, ways: Mapping[str, Way]) -> str:
    """Say in one sentence a way which prefill was faster here."""
    said = []
    for name, way in ways.items():
        ratio = dense.later / way.measured.later
        better, factor = (name, ratio) if ratio > 1 else ("dense attention", 1 / ratio)
        if 0.97 < ratio < 1.03:
            said.append(f"Here the prefills with dense attention and with {name} took the same time.")
        else:
            other = "" if better == name else f" than that with {name}"
            said.append(f"Here the prefill with {better} was {factor:.2f} times faster{other}, compilation apart.")
    return " ".join(said)


def draw_two_heads(stats: Sequence[FlexPrefillStats], masks: Sequence[BlockMask | None], path: Path) -> str:
    """Draw the head of median density of each kind, or two heads where only one kind occurs; return a line that names them.

    `stats` and `masks` are those of one prefill, by layer; a layer that ran dense has no mask.
    """
    heads = []
    for layer, layer_stats in enumerate(stats):
        if masks[layer] is None:
            continue
        for head, (aware, density) in enumerate(zip(layer_stats.is_query_aware[0], layer_stats.density[0], strict=True)):
            heads.append((float(density), layer, head, "query-aware" if aware else "vertical-slash"))
    heads.sort()
    kinds = [[entry for entry in heads if entry[3] == kind] for kind in ("query-aware", "vertical-slash")]
    if all(kinds):
        chosen = [kind[len(kind) // 2] for kind in kinds]
    else:
        chosen = [heads[len(heads) // 4], heads[3 * len(heads) // 4]]
    titles = [f"layer {layer}, head {head}: {kind}" for _, layer, head, kind in chosen]
    drawn = [mask for _, layer, _, _ in chosen if (mask := masks[layer]) is not None]
    figure: Any = plot_block_mask(drawn, [head for _, _, head, _ in chosen], titles)[0].figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return f"Masks of {titles[0]} and {titles[1]}: {path}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line and fill in the defaults that depend on the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, help="length of the prompt; default: 16384 on a CPU, 65536 elsewhere")
    parser.add_argument(
        "--needles", type=int, default=16, help=f"needles in the prompt; the first {MOST_QUESTIONS} are asked for"
    )
    parser.add_argument("--chunk", type=int, help="prefill in chunks of this many tokens; the blocks shown are the last chunk's")
    parser.add_argument("--gamma", type=float, default=DEFAULTS.gamma, help="share of the attention mass to keep, 0 to 1")
    parser.add_argument(
        "--tau", type=float, default=DEFAULTS.tau, help="Jensen-Shannon distance below which a head is query-aware, 0 to 1"
    )
    parser.add_argument("--min-budget", type=int, default=DEFAULTS.min_budget, help="floor in tokens that every head keeps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model")
    parser.add_argument("--picture", type=Path, default=Path("out/demo_masks.png"), help="file to draw the masks to")
    options = parser.parse_args(arguments)
    if options.prompt_tokens is None:
        options.prompt_tokens = 16384 if options.device == "cpu" else 65536
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both kinds of attention, print the table, draw the picture."""
    options = parse(arguments)
    config = FlexPrefillConfig(gamma=options.gamma, tau=options.tau, min_budget=options.min_budget)
    model = load_model(options.model, options.device)
    prompt = make_prompt(options.prompt_tokens, options.needles, min(options.needles, MOST_QUESTIONS), options.seed)
    where = f"{torch.get_num_threads()} CPU threads" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    print(
        f"A prompt of {options.prompt_tokens:,} tokens with {options.needles} needles, for {options.model}\n"
        f"({model.num_parameters() / 1e6:.1f}M parameters, {str(model.dtype).removeprefix('torch.')}), on {where}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}.\n"
        f"FlexPrefill with gamma {config.gamma:g}, tau {config.tau:g}, a floor of {config.min_budget:,} tokens.\n",
        flush=True,
    )
    dense_below = PrefillSettings().break_even
    if options.prompt_tokens < dense_below:
        print(f"Shorter than dense_below, {dense_below:,} tokens: FlexPrefill runs this prompt dense.\n", flush=True)
    # advice from torch's compiler to its own users
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    blocks: dict[str, Block] = {
        DENSE: lambda: nullcontext(FlexPrefillRun()),
        PICTURED: functools.partial(flexprefill, model, config=config),
    }
    if getattr(model.config, CONFIG_KEY, None) is not None:
        blocks["tuned gammas"] = functools.partial(flexprefill, model)  # with what the config holds
    with tqdm(total=(2 + ROUNDS) * len(blocks), leave=False, disable=None, bar_format="{l_bar}{bar}| {elapsed}") as bar:
        first = {name: measure(model, prompt, name, block, options.chunk, bar) for name, block in blocks.items()}
        later = later_prefills(model, prompt, blocks, options.chunk, bar)
    measured = {name: replace(each, later=later[name]) for name, (each, _) in first.items()}
    dense = measured.pop(DENSE)
    # those of the last chunk
    ways = {
        name: Way(each, [by_chunk[-1] for _, by_chunk in sorted(first[name][1].stats.items())]) for name, each in measured.items()
    }
    masks = [by_chunk[-1] for _, by_chunk in sorted(first[PICTURED][1].masks.items())]
    print(table(dense, ways), verdict(dense, ways), sep="\n\n")
    if any(mask is not None for mask in masks):
        print(draw_two_heads(ways[PICTURED].stats, masks, options.picture))


if __name__ == "__main__":
    main()
