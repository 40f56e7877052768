"""Greedy answers to prompts of one length."""

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from bench.decoding import decode, prefill

MODEL = Path(__file__).parent / "model"


def greedy(model: PreTrainedModel, token_ids: Tensor, num_answer_tokens: int) -> Tensor:
    """Greedy answers to prompts (count, num_tokens), (count, num_answer_tokens) int64."""
    return decode(model, *prefill(model, token_ids), num_answer_tokens)
