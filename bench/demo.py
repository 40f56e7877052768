"""Dense attention and two sparse prefills of a trained model, side by side: ``python -m bench.demo``, or ``make demo``.

The model reads a long prompt with needles in it and answers questions about them: after a dense prefill, after one with hybrid
(what we recommend) and after one with the paper's method. Under two minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
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

MOST_QUESTIONS = 16
# prefills after the first one, which may compile; the fastest counts
LATER = 1 if torch.get_num_threads() < 4 else 3
# by method: its name in the table
METHODS = {"": "dense attention", "hybrid": "hybrid", "flexprefill": "the paper's (flexprefill)"}
NEXT = """Try next:
  python -m bench.demo --prompt-tokens 32768 --gamma 0.8     a longer prompt, and fewer blocks
  python -m bench.report.pictures masks --out out            which blocks two of its heads keep
  python -m bench.speed.model --model PATH_OR_NAME           the time to the first token of your own model"""


@dataclass
class Measured:
    """One kind of attention: seconds of its fastest later prefill, its answers, and the kept share of the blocks."""

    seconds: float
    answers: Tensor  # (questions, 4)
    density: float


def load_model(path: Path, device: str) -> PreTrainedModel:
    """Load the model, in bfloat16 except on CPUs, where float32 is faster; its dense attention is SDPA."""
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"no model at {path}; train one with: python -m bench.retriever.train --out DIR")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    transformers.utils.logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    model: PreTrainedModel = loaded.to(device).eval()
    return model


def measure(model: PreTrainedModel, prompt: Prompt, gamma: float | None, bar: tqdm) -> dict[str, Measured]:
    """Answer with every kind of attention, then prefill again in turns."""
    options: dict[str, Any] = {} if gamma is None else {"gamma": gamma}

    def attention(method: str) -> AbstractContextManager[Any]:
        return sparse_prefill(model, method, **options) if method else nullcontext()

    found = {}
    for method, name in METHODS.items():
        bar.set_description(f"{name}: the first prefill compiles" if method else f"{name}: prefill")
        with attention(method) as run:
            logits, cache = prefill(model, prompt)
            stats = [calls[0].density.mean() for calls in run.stats.values()] if method else []
            bar.update()
            bar.set_description(f"{name}: answers")
            answers = decode_answers(model, prompt, logits, cache)
        found[method] = Measured(math.inf, answers, float(torch.stack(stats).mean()) if stats else 1.0)
        bar.update()
    for _ in range(LATER):
        for method, name in METHODS.items():
            bar.set_description(f"{name}: prefill")
            with attention(method):
                start = time.perf_counter()
                prefill(model, prompt)[0].float().cpu()  # waits for the device
                found[method].seconds = min(found[method].seconds, time.perf_counter() - start)
            bar.update()
    return found


def line(method: str, each: Measured, dense: Measured, right: Tensor) -> str:
    """What a way gives, in plain words."""
    asked = len(right)
    correct = int((each.answers == right).all(-1).sum())
    name = f"{METHODS[method]:<26} prefill {each.seconds:6.2f} s"
    if not method:
        return f"{name}   {correct} of {asked} answers right"
    ratio = dense.seconds / each.seconds
    speed = "as fast" if 0.97 < ratio < 1.03 else f"{ratio:.1f}x faster" if ratio > 1 else f"{1 / ratio:.1f}x slower"
    same = int((each.answers == dense.answers).all(-1).sum())
    said = f"the same {asked} answers" if same == asked else f"{correct} of {asked} answers right, {same} as with dense attention"
    return f"{name}   {speed}, {said}, {each.density:.0%} of the blocks"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line and fill in the default that depends on the device."""
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
    """Measure every kind of attention, and print a line for each."""
    options = parse(arguments)
    model = load_model(options.model, options.device)
    prompt = make_prompt(options.prompt_tokens, options.needles, min(options.needles, MOST_QUESTIONS), options.seed)
    where = f"{torch.get_num_threads()} CPU threads" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    size = f"{model.num_parameters() / 1e6:.1f} million parameters"
    print(f"A small model ({size}) reads {options.prompt_tokens:,} tokens with {options.needles} needles in them, on {where}.\n")
    if options.prompt_tokens < DENSE_BELOW:
        print(f"Shorter than {DENSE_BELOW:,} tokens: the sparse prefills run dense (dense_below).\n")
    # advice from torch's compiler to its own users
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    with tqdm(total=(2 + LATER) * len(METHODS), leave=False, disable=None, bar_format="{l_bar}{bar}| {elapsed}") as bar:
        found = measure(model, prompt, options.gamma, bar)
    for method, each in found.items():
        print(line(method, each, found[""], prompt.answers))
    print(f"\n{NEXT}")


if __name__ == "__main__":
    main()
