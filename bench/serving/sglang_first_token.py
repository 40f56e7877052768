"""SGLang's times, stock and with the plug-in: ``python -m bench.serving.sglang_first_token --shape NAME --csv FILE``.

Two engines share the device and answer in turns, with SGLang's defaults except for the prefix cache, which is off. Random weights
have no density worth a figure: `settings_of` gives hybrid's own at a prompt's length.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.rows import Sheet
from bench.serving.first_token import turn, wait_for_engines
from bench.serving.prompts import add_model, model_folder, prompts
from bench.speed.clock import device_name
from flexmask.json_settings import json_data

# of hybrid at gamma 0.9 on SmolLM2 (bench/archive/EARLIER.md), by tokens; shorter and longer prompts take the nearest length's
OWN_DENSITY = {8192: 0.257, 16384: 0.232, 32768: 0.170, 65536: 0.121}
BLOCK = 128
STOCK, HYBRID = "stock", "hybrid"
IDENTITY = ("run", "model", "layers", "kernel", "attention", "prompts", "prompt_tokens", "new_tokens", "device", "sglang")
COLUMNS = (*IDENTITY, "seconds", "density", "rounds", "chunk", "settings", "torch")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--prompt-tokens", type=int, default=32768)
    parser.add_argument("--settings", type=json_data, help="the plug-in's, JSON (hybrid with the density of real text)")
    parser.add_argument("--override", help='JSON over the model\'s config, like {"rope_parameters": ...}')
    parser.add_argument("--at-once", type=int, default=0, help="also measure throughput with so many prompts at a time")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens per prompt in the measurement of throughput")
    parser.add_argument("--run", help="a name: only rows of the same one are compared")
    parser.add_argument("--turns", type=Path, help="file that several of these programs lock in turns, to measure one at a time")
    parser.add_argument("--programs", type=int, default=1, help="with --turns: start when so many are ready")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that a median is taken over, after the first")
    parser.add_argument("--kernel", default="fa3", help="SGLang's attention backend, the stock one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.texts and not options.model:
        parser.error("--texts needs --model, whose tokens they have")
    return options


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what this process and those that it starts inside print to a file."""
    former = os.dup(1), os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(former[0], 1)
        os.dup2(former[1], 2)


def density(log: Path) -> float | None:
    """The mean density that the plug-in logged last."""
    found = re.findall(r"mean density ([\d.]+)%", log.read_text(encoding="utf-8", errors="replace"))
    return float(found[-1]) / 100 if found else None


def make_engine(options: argparse.Namespace, model: str, settings: dict[str, Any] | None) -> Any:
    """Start an engine: the plug-in under `settings`, stock with None."""
    os.environ["FLEXMASK_SGLANG"] = json.dumps({"dense_below": 0, "log_every": 5.0, **(settings or {})})
    import sglang

    number, on_cpu = max(options.at_once, 1), options.device == "cpu"
    return sglang.Engine(
        model_path=model,
        load_format="dummy" if options.shape else "auto",
        skip_tokenizer_init=True,
        device=options.device,
        dtype="float32" if on_cpu else "bfloat16",
        attention_backend=options.kernel,
        prefill_attention_backend=options.kernel if settings is None else "flexmask",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_radix_cache=True,
        disable_cuda_graph=on_cpu,
        context_length=options.prompt_tokens + options.new_tokens + 64,
        max_total_tokens=number * (options.prompt_tokens + options.new_tokens + 64),
        max_running_requests=max(number, 2),
        # of what is free: the pool has the size given above
        mem_fraction_static=0.5 if on_cpu else 0.9,
        random_seed=0,
        log_level="info",
        **({"json_model_override_args": options.override} if options.override else {}),
    )


def generate(engine: Any, asked: list[list[int]], new_tokens: int) -> float:
    """Seconds until all prompts have their new tokens."""
    start = time.perf_counter()
    engine.generate(input_ids=asked, sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True})
    return time.perf_counter() - start


def own_density(tokens: int) -> float:
    """Hybrid's density on real text at the measured length nearest to `tokens`."""
    return OWN_DENSITY[min(OWN_DENSITY, key=lambda length: abs(math.log(length / tokens)))]


def settings_of(tokens: int) -> dict[str, Any]:
    """Settings under which random weights keep as many blocks of prompts of so many tokens as real text."""
    number = -(-tokens // BLOCK)
    wanted = own_density(tokens) * number * (number + 1) / 2
    blocks = min(range(1, number + 1), key=lambda nearest: abs(_kept(nearest, number) - wanted))
    return {"method": HYBRID, "gamma": 0.1, "min_coverage": 0.0, "min_budget": blocks * BLOCK}


def _kept(nearest: int, number: int) -> int:
    """Blocks that hybrid keeps of so many query blocks where attention is even: the nearest, the first, and all of the last."""
    return sum(min(seen, nearest + 1) for seen in range(1, number)) + number


def main(arguments: Sequence[str] | None = None) -> None:
    """Start both engines and measure them in turns."""
    options = parse(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tokens = options.prompt_tokens
    model = model_folder(options)
    settings = {STOCK: None, HYBRID: settings_of(tokens) if options.settings is None else options.settings}
    logs = {attention: Path(tempfile.mkstemp(".log")[1]) for attention in settings}
    engines = {}
    for attention, own in settings.items():
        try:
            with output_to(logs[attention]):
                engines[attention] = make_engine(options, model, own)
        except BaseException:
            print(logs[attention].read_text(errors="replace")[-8000:])
            raise
    import sglang

    chunk = next(iter(engines.values())).tokenizer_manager.server_args.chunked_prefill_size
    common = {"run": options.run, "model": options.model or options.shape, "layers": options.layers, "kernel": options.kernel}
    common |= {"chunk": chunk, "rounds": options.rounds, "device": device_name()}
    common |= {"sglang": sglang.__version__, "torch": torch.__version__}
    if options.turns:
        wait_for_engines(options.turns, options.programs)
    sheet = Sheet(options.csv, COLUMNS, IDENTITY)
    for number, new_tokens in [(1, 1), *([(options.at_once, options.new_tokens)] if options.at_once else [])]:
        asked = prompts(options, tokens, number)
        with turn(options.turns):
            rounds = [
                {name: generate(engine, asked, new_tokens) for name, engine in engines.items()} for _ in range(options.rounds + 1)
            ]
        for attention in engines:
            row = {"attention": attention, "prompts": number, "prompt_tokens": tokens, "new_tokens": new_tokens}
            row["seconds"] = statistics.median(each[attention] for each in rounds[1:])
            row |= {"settings": settings[attention] or {}, "density": density(logs[attention])}
            sheet.add(**common, **row)
            print({**common, **row}, flush=True)
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
