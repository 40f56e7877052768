"""Greedy answers of a vLLM engine to the prompts of ``bench.answers prompts``: ``python -m bench.serving.greedy --help``.

Rows go to ``--out``, as `bench.report.greedy` reads them. Those of transformers are of ``bench.answers run --greedy`` on the same
prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.answers.evaluate import DENSE
from bench.answers.prompts import read_prompts
from bench.rows import Row, append_row
from bench.serving import first_token, vllm_engine
from flexmask.json_settings import json_data

_SHOWN = 160  # characters of an answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--prompts", type=Path, required=True, help="file of `bench.answers prompts`")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stock", action="store_true", help="vLLM's FLASH_ATTN, without the plug-in")
    how.add_argument("--settings", type=json_data, default={"gamma": 0.9}, help='the plug-in\'s, JSON ({"gamma": 0.9})')
    parser.add_argument("--chunk", type=int, help="rows of a step (a whole prompt)")
    parser.add_argument("--at-once", type=int, default=1, help="prompts that the engine gets together (1)")
    parser.add_argument("--most-tokens", type=int, default=33024, help="of a prompt with its answer (33,024)")
    parser.add_argument("--new-tokens", type=int, default=40, help="of an answer, if the prompt allows so many (40)")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON: more arguments of vllm.LLM")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="file that rows are added to")


def engine_options(options: argparse.Namespace) -> argparse.Namespace:
    """Those of `vllm_engine.make_engine`."""
    arguments = [
        "--model",
        options.model,
        "--prompt-tokens",
        str(options.chunk or options.most_tokens),
        "--json",
        str(options.out),
    ]
    arguments += ["--new-tokens", "1", "--at-once", str(options.at_once), "--device", options.device, "--dtype", options.dtype]
    own = ["--stock"] if options.stock else ["--settings", json.dumps(options.settings)]
    return first_token.parse([*arguments, *own])


def answers(llm: Any, tokenizer: Any, prompts: Sequence[Row], options: argparse.Namespace) -> Iterator[Row]:
    """A row per prompt; the score is the share of the answer's parts that the text names."""
    from vllm import SamplingParams

    for first in range(0, len(prompts), options.at_once):
        some = prompts[first : first + options.at_once]
        ids = [tokenizer(each["prompt"], add_special_tokens=False).input_ids for each in some]
        how = [SamplingParams(temperature=0, max_tokens=min(each["new_tokens"], options.new_tokens)) for each in some]
        outputs = llm.generate([{"prompt_token_ids": each} for each in ids], how, use_tqdm=False)
        for prompt, output in zip(some, outputs, strict=True):
            text = output.outputs[0].text
            score = sum(part.lower() in text.lower() for part in prompt["answers"]) / len(prompt["answers"])
            yield {"task": prompt["task"], "index": prompt["index"], "score": round(score, 4), "text": text[:_SHOWN]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    lengths = {"max_model_len": options.most_tokens, "hf_overrides": {"max_position_embeddings": options.most_tokens}}
    llm = vllm_engine.make_engine(engine_options(options), **{**lengths, **options.engine})
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    method = DENSE["name"] if options.stock else f"hybrid {options.settings['gamma']}"
    how = "whole" if options.chunk is None else "chunks" + (f", {options.at_once} at once" if options.at_once > 1 else "")
    for row in answers(llm, tokenizer, read_prompts(options.prompts), options):
        append_row(options.out, {"engine": "vllm", "method": method, "how": how, **row})
        print(row, flush=True)


if __name__ == "__main__":
    main()
