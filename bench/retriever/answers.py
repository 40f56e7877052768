"""Greedy answers to every question of a prompt from one prefilled cache."""

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from bench import decoding
from bench.retriever.task import ANSWER_TOKENS, QUESTION_TOKENS, Prompt


def prefill(model: PreTrainedModel, prompt: Prompt) -> tuple[Tensor, Cache]:
    """Logits at the prompt's last position, (vocab_size,), and the cache."""
    logits, cache = decoding.prefill(model, prompt.token_ids[None])
    return logits[0], cache


@torch.no_grad()
def decode_answers(model: PreTrainedModel, prompt: Prompt, logits: Tensor, cache: Cache) -> Tensor:
    """Decode the first answer from `prefill`'s result, then the others, each against the haystack only.

    The cache then holds the haystack without the first question.

    Returns
    -------
    Tensor, (num_queries, 4), int64, on the CPU
        An answer is right if all four tokens equal those of ``prompt.answers``.
    """
    answers: list[Tensor] = []
    for question in prompt.questions:
        if answers:
            for token in question:
                logits = _feed(model, token, cache)
        answer = [logits.argmax().to(model.device)]
        while len(answer) < ANSWER_TOKENS:
            logits = _feed(model, answer[-1], cache)
            answer.append(logits.argmax())
        answers.append(torch.stack(answer).cpu())
        cache.crop(-(QUESTION_TOKENS + ANSWER_TOKENS - 1))
    return torch.stack(answers)


def _feed(model: PreTrainedModel, token: Tensor, cache: Cache) -> Tensor:
    """Logits after one more token, (vocab_size,)."""
    return model(input_ids=token.to(model.device).view(1, 1), **{decoding.CACHE: cache}).logits[0, -1]
