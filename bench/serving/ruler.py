"""RULER's tasks in vLLM: ``python -m bench.serving.ruler prompts MODEL --books FILE --out PROMPTS``, then ``answers``.

``prompts`` needs lm-evaluation-harness 0.4.13, whose generators it calls; books stand for the essays, which they would download.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from pathlib import Path
from typing import Any

ANSWER_TOKENS = {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}
WORDS = {"type_needle_k": "words", "type_needle_v": "numbers"}
NEEDLES: dict[str, tuple[str, dict[str, Any]]] = {
    "niah_single_1": ("repeat", WORDS),
    "niah_single_2": ("essay", WORDS),
    "niah_multikey_1": ("essay", {**WORDS, "num_needle_k": 4}),
    "niah_multikey_2": ("needle", WORDS),
    "niah_multikey_3": ("needle", {"type_needle_k": "uuids", "type_needle_v": "uuids"}),
    "niah_multivalue": ("essay", {**WORDS, "num_needle_v": 4}),
    "niah_multiquery": ("essay", {**WORDS, "num_needle_q": 4}),
}


def documents(task: str, tokenizer: Any, book: str, length: int, number: int) -> list[dict[str, Any]]:
    """Prompts and answers of one task."""
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils

    random.seed(42)
    if task in NEEDLES:
        haystack, options = NEEDLES[task]
        prepare_niah.cached_sent_tokenize = lambda text: re.split(r"(?<=[.!?]) ", text)
        straw = re.sub(r"\s+", " ", book).split(" ") if haystack == "essay" else prepare_niah.get_haystack(type_haystack=haystack)
        shape = {"max_seq_length": length, "template": niah_utils.TEMPLATE, "type_haystack": haystack, "num_samples": number}
        return prepare_niah.generate_samples(straw, TOKENIZER=tokenizer, **shape, **options)
    if task == "ruler_vt":
        example = vt_utils.sys_vartrack_w_noise_random(tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5)[0]
        return vt_utils.sys_vartrack_w_noise_random(
            tokenizer=tokenizer, num_samples=number, max_seq_length=length, icl_example=example
        )
    if task == "ruler_cwe":
        return cwe_utils.sys_word_pair_random(num_samples=number, max_seq_length=length, tokenizer=tokenizer)
    return fwe_utils.sys_kwext(tokenizer=tokenizer, max_seq_length=length, num_samples=number)


def make(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    book, found = "\n".join(path.read_text(encoding="latin-1") for path in options.books), []
    for task in (*NEEDLES, "ruler_vt", "ruler_cwe", "ruler_fwe"):
        for index, document in enumerate(documents(task, tokenizer, book, options.length, options.number)):
            asked = [{"role": "user", "content": document["input"]}]
            prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True) + (
                document["gen_prefix"] or ""
            )
            tokens = ANSWER_TOKENS.get(task, 128)
            found.append({"task": task, "index": index, "prompt": prompt, "outputs": list(document["outputs"]), "tokens": tokens})
    with lzma.open(options.out, "wt") as file:
        json.dump(found, file)


def answer(options: argparse.Namespace) -> None:
    """Greedy answers; a score is the share of the wanted strings that an answer holds, as in the harness."""
    from vllm import LLM, SamplingParams

    ours = {"attention_backend": "CUSTOM", "additional_config": {"flexmask": options.settings}}
    most = options.length + 256
    limits = {"max_model_len": most, "max_num_batched_tokens": most, "hf_overrides": {"max_position_embeddings": most}}
    how = {"attention_backend": "FLASH_ATTN"} if options.settings is None else ours
    given: dict[str, Any] = {"dtype": "bfloat16", "seed": 0, "enable_prefix_caching": False, "enforce_eager": True}
    llm = LLM(options.model, max_num_seqs=32, **given, **limits, **how)
    with lzma.open(options.prompts, "rt") as file:
        prompts = json.load(file)
    sampling = [SamplingParams(temperature=0, max_tokens=row["tokens"]) for row in prompts]
    with options.out.open("a") as file:
        for row, output in zip(prompts, llm.generate([row["prompt"] for row in prompts], sampling), strict=True):
            text = output.outputs[0].text.lower()
            score = sum(wanted.lower() in text for wanted in row["outputs"]) / len(row["outputs"])
            tokens = len(output.prompt_token_ids)
            own = {"method": options.name, "task": row["task"], "index": row["index"], "tokens": tokens, "score": score}
            file.write(json.dumps(own) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for run, name in ((make, "prompts"), (answer, "answers")):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("model")
        if run is answer:
            command.add_argument("prompts", type=Path)
            command.add_argument("--name", required=True, help="the method's in the rows")
            command.add_argument("--settings", type=json.loads, help="the plug-in's, as JSON; none: vLLM's own backend")
        else:
            command.add_argument("--books", type=Path, nargs="+", required=True)
            command.add_argument("--number", type=int, default=48)
        command.add_argument("--length", type=int, default=32768)
        command.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
