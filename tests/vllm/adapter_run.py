"""The adapter for transformers with the prompts and chunks of `engine_run`: ``python -m tests.vllm.adapter_run [WORD ...] OUT``.

Without words it runs the retriever in float32 on a CPU. ``cuda`` is a GPU in bfloat16, ``bfloat16`` that dtype on a CPU,
``latent`` the model of `random_models.deepseek`, a name in `engines.MIXTURES` its model, and a number the tokens in a page.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from flexmask import sparse_prefill
from tests.serving import programs
from tests.vllm import random_models
from tests.vllm.engines import ENGINES, LATENT_ON_CUDA, MIXTURES, MODEL


def forget(cache, windows):
    """Make zeros of the tokens that no later one sees, as the plug-in does; transformers would move the others forward."""
    for layer, window in zip(cache.layers, windows, strict=True):
        if window is not None:
            for each in (layer.keys, layer.values):
                each[:, :, : max(0, each.shape[2] - window + 1)] = 0


@torch.no_grad()
def log_probabilities(model, tokens, chunk, options, min_rows):
    """Of every token but the first, given those before it; and the most likely next one."""
    cache, logits = DynamicCache(config=model.config), []
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    cache.layers = [layer if window is None else DynamicLayer() for layer, window in zip(cache.layers, windows, strict=True)]
    tokens = torch.tensor([tokens], device=model.device)
    for part in tokens.split(chunk, 1):
        is_sparse = options is not None and part.shape[1] >= min_rows
        with sparse_prefill(model, **options, prompt_len=tokens.shape[1]) if is_sparse else nullcontext():
            logits.append(model(input_ids=part, past_key_values=cache).logits[0])
        forget(cache, windows)
    # in float32, as vLLM computes them
    every = torch.cat(logits).float().log_softmax(-1)
    return {"prompt_logprobs": every[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist(), "token": int(every[-1].argmax())}


def main(*words_and_out):
    *words, out = words_and_out
    device = "cuda" if "cuda" in words else "cpu"
    mixtures = MIXTURES.keys() & set(words)
    if mixtures:
        engines = [f"{name}{kind}" for name in mixtures for kind in ("_stock", "_half")]
    else:
        engines = ["latent_sparse", "latent_half"] if "latent" in words else ["sparse", "flexprefill", "by_head"]
    engine = ENGINES[engines[0]]
    path, prompt = MODEL, programs.prompt
    if engine.model is not None:
        path, prompt = engine.model(Path(out).with_suffix(".model")), random_models.prompt
    questions = LATENT_ON_CUDA if "latent" in words and device == "cuda" else engine.questions
    asked = {
        name: (prompt(*prompts[0]), chunk)
        for name, (chunk, prompts, _) in questions.items()
        if name in ("whole", "chunks", "odd_chunks")
    }
    if engine.arguments.get("enable_prefix_caching"):
        # as in vLLM, which keeps states at the ends of pages, chunks end there, the last but one at the last whole page
        page = next(int(word) for word in words if word.isdigit())
        for name, (tokens, chunk) in asked.items():
            most, whole = chunk // page * page, len(tokens) // page * page
            asked[name] = tokens, [x for x in (*[most] * (whole // most), whole % most, len(tokens) - whole) if x]
    # FLASH_ATTN_MLA decodes shorter chunks
    min_rows = 513 if questions is LATENT_ON_CUDA else 2
    dtype = "bfloat16" if {"cuda", "bfloat16"} & set(words) else engine.arguments.get("dtype", "float32")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()
    results = {
        name: {each: log_probabilities(model, *given, ENGINES[name].options, min_rows) for each, given in asked.items()}
        for name in engines
    }
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
