"""A trained model reads a prompt with dense attention and with parts of it: ``python -m bench.demo``, or ``make demo``.

Prints the answers, the share of blocks that each method keeps, and a picture of one head's. Times only where they say
something: on accelerators, of several rounds.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.prompts.captured import MODEL
from bench.retriever.answers import decode_answers, prefill
from bench.retriever.task import Prompt, make_prompt
from flexmask.export import to_block_map
from flexmask.integrations.huggingface import sparse_prefill
from flexmask.settings import PrefillSettings

MAX_QUESTIONS = 8
# timed prefills per method on accelerators, in turns
ROUNDS = 5
# characters of a picture's sides
PICTURE = 32
# by method: its name in the table
METHODS = {"hybrid": "hybrid", "flexprefill": "the paper's (flexprefill)", "streaming_llm": "a window, as many blocks"}
# commands to try, each with what it shows
NEXT = {
    "python -m bench.demo --prompt-tokens 32768 --gamma 0.8": "a longer prompt, and fewer blocks",
    "python -m flexmask gain PATH_OR_NAME --prompt FILE": "what a model of yours would gain on this machine",
}


@dataclass
class Measured:
    """Answers, density, one head's kept blocks, and seconds of the timed prefills of one kind of attention."""

    answers: Tensor  # (questions, 4)
    density: float = 1.0
    kept: Tensor | None = None  # (q_blocks, kv_blocks), bool
    seconds: list[float] = field(default_factory=list)


def load_model(path: Path, device: str) -> PreTrainedModel:
    """Load the model: float32 on CPUs, where it is faster, else bfloat16; dense attention is SDPA."""
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"no model at {path}")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    transformers.utils.logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    model: PreTrainedModel = loaded.to(device).eval()
    return model


def window_of(density: float, num_blocks: int) -> int:
    """The narrowest window, in blocks, that with one block of sinks keeps at least a share of the causal blocks."""
    every = num_blocks * (num_blocks + 1) // 2
    return next(
        w for w in range(1, num_blocks + 1) if sum(min(row, w + 1) for row in range(1, num_blocks + 1)) >= density * every
    )


def read_with(model: PreTrainedModel, prompt: Prompt, settings: PrefillSettings | None) -> Measured:
    """Answers after a dense prefill, or a sparse one with its masks."""
    if settings is None:
        return Measured(decode_answers(model, prompt, *prefill(model, prompt)))
    with sparse_prefill(model, settings=settings, collect_masks=True) as run:
        answers = decode_answers(model, prompt, *prefill(model, prompt))
    densities = {layer: calls[0].density.mean(0) for layer, calls in run.stats.items()}  # by head
    # the head nearest to the mean, in the layer that keeps least
    layer = min(densities, key=lambda layer: float(densities[layer].mean()))
    head, mask = int((densities[layer] - densities[layer].mean()).abs().argmin()), run.masks[layer][0]
    kept = None if mask is None else to_block_map(mask)[0, min(head, mask.shape[1] - 1)].bool().cpu()
    return Measured(answers, float(torch.stack(list(densities.values())).mean()), kept)


def seconds_of(model: PreTrainedModel, prompt: Prompt, settings: PrefillSettings | None) -> float:
    """Seconds of one prefill, from the prompt to the logits on the host."""
    start = time.perf_counter()
    if settings is None:
        prefill(model, prompt)[0].float().cpu()
    else:
        with sparse_prefill(model, settings=settings, collect_stats=False):
            prefill(model, prompt)[0].float().cpu()
    return time.perf_counter() - start


def measure(model: PreTrainedModel, prompt: Prompt, given: dict[str, Any], rounds: int, bar: tqdm) -> dict[str, Measured]:
    """By method, dense attention under ``""``: a prefill with answers, then timed ones in turns."""
    found: dict[str, Measured] = {}
    settings: dict[str, PrefillSettings | None] = {"": None}
    blocks = -(-len(prompt.token_ids) // 128)
    for method in ("", *METHODS):
        doing = METHODS.get(method, "dense attention") + (", and compiling" if method == "hybrid" else "")
        bar.set_description(doing)
        if bar.disable:  # no terminal
            print(f"{doing} ...", file=sys.stderr, flush=True)
        if method == "streaming_llm":
            options: dict[str, Any] = {"sink_blocks": 1, "window_blocks": window_of(found["hybrid"].density, blocks)}
        else:
            options = given
        if method:
            # the answers show the selection at any length
            settings[method] = PrefillSettings(method=method, dense_below=0, **options)
        found[method] = read_with(model, prompt, settings[method])
        bar.update()
    for _ in range(rounds):
        for method, each in found.items():
            each.seconds.append(seconds_of(model, prompt, settings[method]))
            bar.update()
    return found


def line(method: str, each: Measured, dense: Measured, right: Tensor) -> str:
    """One line of the result."""
    correct = int((each.answers == right).all(-1).sum())
    kept = f"{each.density:4.0%} of the blocks" if method else "every block       "
    parts = [f"{METHODS.get(method, 'dense attention'):<26} {kept}   {correct} of {len(right)} answers right"]
    if each.seconds:
        parts.append(f"prefill {min(each.seconds):.3f} to {max(each.seconds):.3f} s")
        if method:
            ratios = [whole / own for whole, own in zip(dense.seconds, each.seconds, strict=True)]
            parts.append(f"{min(ratios):.2f} to {max(ratios):.2f} times as fast")
    return ", ".join(parts)


def picture(kept: Tensor) -> str:
    """A map of kept blocks, (q_blocks, kv_blocks) bool, in characters: `#` all of a square kept, `+` some, `.` none."""
    number, side = len(kept), min(PICTURE, len(kept))
    edges = [number * at // side for at in range(side + 1)]
    causal = torch.ones(number, number, dtype=torch.bool).tril()
    rows = []
    for row in range(side):
        signs = []
        for column in range(row + 1):
            square = slice(edges[row], edges[row + 1]), slice(edges[column], edges[column + 1])
            held, visible = int((kept[square] & causal[square]).sum()), int(causal[square].sum())
            signs.append("#" if held == visible else "+" if held else ".")
        rows.append(" ".join(signs))
    return "\n".join(f"  {row}" for row in rows)


def python() -> str:
    """The name by which a shell in this folder finds this Python."""
    if (found := shutil.which("python")) is not None and Path(found).absolute() == Path(sys.executable).absolute():
        return "python"
    here = Path.cwd()
    return str(Path(sys.executable).relative_to(here)) if here in Path(sys.executable).parents else sys.executable


def to_try(executable: str) -> str:
    """The lines with commands to try next."""
    commands = {command.replace("python", executable, 1): shown for command, shown in NEXT.items()}
    width = max(map(len, commands))
    return "\n".join(["Try next:", *(f"  {command:<{width}}   {shown}" for command, shown in commands.items())])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, help="length of the prompt; default: 8192 on a CPU, 65536 elsewhere")
    parser.add_argument("--needles", type=int, default=16, help=f"in the prompt; the first {MAX_QUESTIONS} are asked for")
    parser.add_argument("--gamma", type=float, help="of hybrid and flexprefill; default: their own")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompt")
    parser.add_argument("--rounds", type=int, help=f"timed prefills of each; default: none on a CPU, {ROUNDS} elsewhere")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model")
    options = parser.parse_args(arguments)
    on_cpu = options.device == "cpu"
    options.prompt_tokens = options.prompt_tokens or (8192 if on_cpu else 65536)
    options.rounds = options.rounds if options.rounds is not None else 0 if on_cpu else ROUNDS
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    model = load_model(options.model, options.device)
    questions = min(options.needles, MAX_QUESTIONS)
    prompt = make_prompt(options.prompt_tokens, options.needles, questions, options.seed)
    given = {} if options.gamma is None else {"gamma": options.gamma}
    where = f"{torch.get_num_threads()} CPU threads" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    size = f"{model.num_parameters() / 1e6:.1f} million parameters"
    what = f"{options.prompt_tokens:,} tokens with {options.needles} needles in them"
    print(f"A small model ({size}) reads {what} and is asked for {questions}, on {where}.\n", flush=True)
    # advice to users of torch's compiler
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    total = (1 + options.rounds) * (1 + len(METHODS))
    with tqdm(total=total, leave=False, disable=None, bar_format="{l_bar}{bar}| {elapsed}") as bar:
        found = measure(model, prompt, given, options.rounds, bar)
    for method, each in found.items():
        print(line(method, each, found[""], prompt.answers))
    kept = found["hybrid"].kept
    if kept is not None:
        print("\nWhat hybrid keeps in one head: queries from top to bottom, keys from left to right, # all, + some, . none")
        print(picture(kept))
    print(f"\n{to_try(python())}")


if __name__ == "__main__":
    # the bar says that it compiles
    logging.getLogger("flexmask").setLevel(logging.ERROR)
    main()
