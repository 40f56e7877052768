"""The adapter for transformers with the chunks of `engine_run`: ``python -m tests.vllm.adapter_run [cuda] OUT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from flexmask import sparse_prefill
from tests.vllm.engine_run import prompt
from tests.vllm.engines import ENGINES, MODEL

# as `engine_run` asks: the length and the seed of a prompt, and its chunks
QUESTIONS = (("whole", 3001, 0, 3001), ("chunks", 5000, 2, 2048), ("odd_chunks", 3000, 3, 777))


@torch.no_grad()
def log_probabilities(model, tokens, chunk):
    """Of every token but the first, given those before it; and the most likely next one."""
    cache, logits = DynamicCache(config=model.config), []
    tokens = torch.tensor([tokens], device=model.device)
    for part in tokens.split(chunk, 1):
        logits.append(model(input_ids=part, past_key_values=cache).logits[0])
    # as vLLM takes them
    every = torch.cat(logits).float().log_softmax(-1)
    return every[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist(), int(every[-1].argmax())


def main(*device_and_out):
    *device, out = device_and_out
    device, dtype = ("cuda", torch.bfloat16) if device == ["cuda"] else ("cpu", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).to(device).eval()
    results: dict[str, dict[str, object]] = {}
    for engine in ("sparse", "flexprefill", "by_head"):
        options = ENGINES[engine].options
        for asked, length, seed, chunk in QUESTIONS if engine != "by_head" else QUESTIONS[:1]:
            with sparse_prefill(model, **options):
                prompt_logprobs, token = log_probabilities(model, prompt(length, seed), chunk)
            results.setdefault(engine, {})[asked] = {"prompt_logprobs": prompt_logprobs, "token": token}
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
