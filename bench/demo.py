"""Answers of a trained model after a dense and two sparse prefills: ``python -m bench.demo``, or ``make demo``."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from flexmask.dense_policy import DENSE_BELOW
from flexmask.integrations.huggingface import sparse_prefill

MOST_QUESTIONS = 8
# timed prefills per method, in turns; the fastest counts
ROUNDS = 2 if torch.get_num_threads() < 4 else 3
# tokens, on a CPU: torch compiles for all lengths at the second one
WARM_UP = (1536, 2304)
# by method: its name in the table
METHODS = {"": "dense attention", "hybrid": "hybrid", "flexprefill": "the paper's (flexprefill)"}
# commands to try, each with what it shows
NEXT = {
    "python -m bench.demo --prompt-tokens 32768 --gamma 0.8": "a longer prompt, and fewer blocks",
    "python -m flexmask gain PATH_OR_NAME --tokens 32768": "what a model of yours would gain on this machine",
}


@dataclass
class Measured:
    """Seconds of the fastest prefill, answers, and density of one kind of attention."""

    seconds: float
    answers: Tensor  # (questions, 4)
    density: float


def load_model(path: Path, device: str) -> PreTrainedModel:
    """Load the model: float32 on CPUs, where it is faster, else bfloat16; dense attention is SDPA."""
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"no model at {path}")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    transformers.utils.logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    model: PreTrainedModel = loaded.to(device).eval()
    return model


def attention(model: PreTrainedModel, method: str, **options: Any) -> AbstractContextManager[Any]:
    """`sparse_prefill` with a method; dense attention if `method` is empty."""
    return sparse_prefill(model, method, **options) if method else nullcontext()


def warm_up(model: PreTrainedModel, prompt: Prompt, options: dict[str, Any], device: str) -> None:
    """Compile by short prompts; on CUDA, where the number of blocks decides which kernels run, by the prompt itself."""
    on_cuda = device.startswith("cuda")
    for method in filter(None, METHODS):
        for each in [prompt] if on_cuda else [make_prompt(tokens) for tokens in WARM_UP]:
            with attention(model, method, **(options if on_cuda else {"dense_below": 0})):
                prefill(model, each)


def measure(model: PreTrainedModel, prompt: Prompt, options: dict[str, Any], bar: tqdm) -> dict[str, Measured]:
    """Prefill with every method in turns; answer in the first turn."""
    found: dict[str, Measured] = {}
    for _ in range(ROUNDS):
        for method, name in METHODS.items():
            bar.set_description(f"{name}: prefill")
            with attention(model, method, **options) as run:
                start = time.perf_counter()
                logits, cache = prefill(model, prompt)
                logits.float().cpu()  # waits for the device
                seconds = time.perf_counter() - start
                bar.update()
                if method in found:
                    found[method].seconds = min(found[method].seconds, seconds)
                    continue
                densities = [calls[0].density.mean() for calls in run.stats.values()] if method else []
                density = float(torch.stack(densities).mean()) if densities else 1.0
                bar.set_description(f"{name}: answers")
                found[method] = Measured(seconds, decode_answers(model, prompt, logits, cache), density)
                bar.update()
    return found


def line(method: str, each: Measured, dense: Measured, right: Tensor) -> str:
    """One line of the result."""
    total = len(right)
    correct = int((each.answers == right).all(-1).sum())
    name = f"{METHODS[method]:<26} prefill {each.seconds:6.2f} s"
    if not method:
        return f"{name}   {correct} of {total} answers right"
    ratio = dense.seconds / each.seconds
    factor = f"{max(ratio, 1 / ratio):.1f}"
    speed = "as fast" if factor == "1.0" else f"{factor}x faster" if ratio > 1 else f"{factor}x slower"
    same = int((each.answers == dense.answers).all(-1).sum())
    answers = (
        f"the same {total} answers" if same == total else f"{correct} of {total} answers right, {same} as with dense attention"
    )
    return f"{name}   {speed}, {answers}, density {each.density:.0%}"


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
    parser.add_argument("--prompt-tokens", type=int, help="length of the prompt; default: 16384 on a CPU, 65536 elsewhere")
    parser.add_argument("--needles", type=int, default=16, help=f"in the prompt; the first {MOST_QUESTIONS} are asked for")
    parser.add_argument("--gamma", type=float, help="of both methods; default: their own")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model")
    options = parser.parse_args(arguments)
    if options.prompt_tokens is None:
        options.prompt_tokens = 16384 if options.device == "cpu" else 65536
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    model = load_model(options.model, options.device)
    questions = min(options.needles, MOST_QUESTIONS)
    prompt = make_prompt(options.prompt_tokens, options.needles, questions, options.seed)
    given = {} if options.gamma is None else {"gamma": options.gamma}
    where = f"{torch.get_num_threads()} CPU threads" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    size = f"{model.num_parameters() / 1e6:.1f} million parameters"
    what = f"{options.prompt_tokens:,} tokens with {options.needles} needles in them"
    print(f"A small model ({size}) reads {what} and is asked for {questions}, on {where}.\n", flush=True)
    if options.prompt_tokens < DENSE_BELOW:
        print(f"Shorter than {DENSE_BELOW:,} tokens: the sparse prefills run dense (dense_below).\n")
    # advice to users of torch's compiler
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    with tqdm(total=1 + (1 + ROUNDS) * len(METHODS), leave=False, disable=None, bar_format="{l_bar}{bar}| {elapsed}") as bar:
        bar.set_description("compiling the attention kernel")
        if options.prompt_tokens >= DENSE_BELOW:
            warm_up(model, prompt, given, options.device)
        bar.update()
        found = measure(model, prompt, given, bar)
    for method, each in found.items():
        print(line(method, each, found[""], prompt.answers))
    print(f"\n{to_try(python())}")


if __name__ == "__main__":
    # the bar says that it compiles
    logging.getLogger("flexmask").setLevel(logging.ERROR)
    main()
