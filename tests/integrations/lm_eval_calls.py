"""Calls of lm-evaluation-harness's models with the retriever."""

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import AutoModelForCausalLM

from bench.retriever.task import make_prompt, text_of
from tests.repository import ROOT

MODEL = str(ROOT / "bench" / "retriever" / "model")
SPARSE = {"method": "hybrid", "gamma": 0.6, "block_size": 32, "min_budget": 0, "dense_below": 0}
LENGTHS = (700, 683, 640, 512, 510, 333, 330, 290)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def loaded():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def make(kind, loaded, batch_size=1, **options):
    return kind(pretrained=loaded, tokenizer=MODEL, batch_size=batch_size, device="cpu", **options)


def prompts(lengths=LENGTHS):
    return [make_prompt(length, 8, 1, seed) for seed, length in enumerate(lengths)]


def scored(lm, pairs):
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    return [score for score, _ in lm.loglikelihood(requests, disable_tqdm=True)]


def answers(lengths=LENGTHS):
    """Each prompt with the answer of the next, whose score moves with the mask."""
    drawn = prompts(lengths)
    return [(each.text(), " " + text_of(other.answers[0])) for each, other in zip(drawn, drawn[1:] + drawn[:1], strict=True)]


def generated(lm, texts, **options):
    options = {"until": [], "max_gen_toks": 6, "do_sample": False, **options}
    requests = [Instance("generate_until", {}, (text, options), index) for index, text in enumerate(texts)]
    return lm.generate_until(requests, disable_tqdm=True)


def same(found, expected):
    return torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0, atol=2e-3)
