"""The adapter for transformers with the prompts and chunks of `engine_run`: ``python -m tests.vllm.adapter_run [WORD ...] OUT``.

Without words it runs the retriever in float32 on a CPU. ``cuda`` is a GPU in bfloat16, ``bfloat16`` that dtype on a CPU,
``latent`` the model of `random_models.deepseek`, and a name in `engines.MIXTURES` its model.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from flexmask import sparse_prefill
from tests.serving.programs import QUESTIONS, prompt
from tests.vllm import random_models
from tests.vllm.engine_run import MIXTURE_CHUNK, MIXTURE_PAGE, latent_chunk
from tests.vllm.engines import ENGINES, HALF, MIXTURES, MODEL

# least rows of a chunk that runs sparse beside FLASH_ATTN_MLA, which decodes the others
LEAST_LATENT_ROWS = {"cpu": 2, "cuda": 513}


@torch.no_grad()
def log_probabilities(model, tokens, chunk, options, least_rows=2):
    """Of every token but the first, given those before it; and the most likely next one."""
    cache, logits = DynamicCache(config=model.config), []
    tokens = torch.tensor([tokens], device=model.device)
    for part in tokens.split(chunk, 1):
        with sparse_prefill(model, **options) if part.shape[1] >= least_rows else nullcontext():
            logits.append(model(input_ids=part, past_key_values=cache).logits[0])
    # as vLLM takes them
    every = torch.cat(logits).float().log_softmax(-1)
    return {"prompt_logprobs": every[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist(), "token": int(every[-1].argmax())}


def of_mixture(name, folder):
    """Of the first prompt of `Asked.of_mixture`, dense and at gamma 0.5."""
    model, arguments = MIXTURES[name]
    dtype = getattr(torch, arguments.get("dtype", "float32"))
    made = AutoModelForCausalLM.from_pretrained(model(folder), dtype=dtype).eval()
    # chunks end at pages, whose states are kept
    chunk = MIXTURE_PAGE if arguments["enable_prefix_caching"] else MIXTURE_CHUNK
    tokens = random_models.prompt(1800)[:1700]
    dense = log_probabilities(made, tokens, chunk, HALF, least_rows=len(tokens) + 1)
    return {"dense": dense, "half": log_probabilities(made, tokens, chunk, HALF)}


def main(*words_and_out):
    *words, out = words_and_out
    if words and words[0] in MIXTURES:
        Path(out).write_text(json.dumps(of_mixture(words[0], Path(out).with_suffix(".model"))), encoding="utf-8")
        return
    device = "cuda" if "cuda" in words else "cpu"
    path = random_models.deepseek(Path(out).with_suffix(".model")) if "latent" in words else MODEL
    dtype = torch.bfloat16 if {"cuda", "bfloat16"} & set(words) else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    if "latent" in words:
        tokens, least_rows = random_models.prompt(1500), LEAST_LATENT_ROWS[device]
        asked = {"whole": (tokens, len(tokens)), "odd_chunks": (tokens, latent_chunk(device))}
        engines = ("latent_sparse", "latent_half")
    else:
        chunked = {name: QUESTIONS[name] for name in ("whole", "chunks", "odd_chunks")}
        asked = {name: (prompt(*prompts[0]), chunk) for name, (chunk, prompts, _) in chunked.items()}
        engines, least_rows = ("sparse", "flexprefill", "by_head"), 2
    results = {
        engine: {
            name: log_probabilities(model, tokens, chunk, ENGINES[engine].options, least_rows)
            for name, (tokens, chunk) in asked.items()
            if engine != "by_head" or name == "whole"
        }
        for engine in engines
    }
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
