"""Prints the summary that integrations/README.md shows: ``python -m bench.sample``; ``--min-coverage 0``: without the floor."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from bench.prompts.captured import MODEL
from bench.retriever.answers import prefill
from bench.retriever.task import make_prompt
from flexmask.integrations.huggingface import PrefillSettings, sparse_prefill
from flexmask.integrations.record.summary import RunSummary

TOKENS = 16384


@torch.no_grad()
def summary(tokens: int = TOKENS, gamma: float = 0.9, min_coverage: float = 0.5) -> RunSummary:
    """One prefill of the retriever in float32, at one gamma for all heads in place of the gammas in its config."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True).eval()
    prompt = make_prompt(tokens, num_needles=16, num_queries=1, seed=0)
    with sparse_prefill(model, settings=PrefillSettings(gamma=gamma, min_coverage=min_coverage)) as run:
        prefill(model, prompt)
    return run.summary()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--min-coverage", type=float, default=0.5, help="hybrid's floor; 0: none")
    print(summary(min_coverage=parser.parse_args().min_coverage))
