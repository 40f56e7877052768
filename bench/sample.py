"""Prints the summary that README.md shows: ``python -m bench.sample``."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from bench.prompts.captured import MODEL
from bench.retriever.answers import prefill
from bench.retriever.task import make_prompt
from flexmask.integrations.huggingface import sparse_prefill
from flexmask.integrations.record.summary import RunSummary

TOKENS = 16384


@torch.no_grad()
def summary(tokens: int = TOKENS, gamma: float = 0.9) -> RunSummary:
    """One prefill of the retriever in float32, at one gamma for all heads: without it the gammas in its config apply."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True).eval()
    prompt = make_prompt(tokens, num_needles=16, num_queries=1, seed=0)
    with sparse_prefill(model, gamma=gamma) as run:
        prefill(model, prompt)
    return run.summary()


if __name__ == "__main__":
    print(summary())
