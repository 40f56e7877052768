"""Training rows with needles and questions over the whole length."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.retriever.task import (
    ANSWER_TOKENS,
    QUESTION_TOKENS,
    RECORD_TOKENS,
    SLOT_TOKENS,
    draw_records,
    draw_short_sentences,
    make_haystack,
)
from bench.retriever.vocabulary import TOKEN_IDS

MAX_NEEDLES = 768


@dataclass(frozen=True)
class TrainingBatch:
    """Rows of tokens, and the positions of answers.

    Attributes
    ----------
    token_ids : Tensor, (batch, num_tokens), int64
    positions : Tensor, (batch, num_questions, 4), int64
        Positions whose *next* token is an answer token, in row order.
    targets : Tensor, (batch, num_questions, 4), int64
        Those next tokens.
    is_asked : Tensor, (batch, num_questions), bool
        False where a short sentence replaced the question.
    is_first : Tensor, (batch, num_questions), bool
        True for the row's first question about a needle.
    """

    token_ids: Tensor
    positions: Tensor
    targets: Tensor
    is_asked: Tensor
    is_first: Tensor


def make_batch(batch: int, num_tokens: int, generator: torch.Generator) -> TrainingBatch:
    """Draw `batch` rows of `num_tokens` >= 97 tokens on the generator's device.

    A quarter of the slots may hold needles, a quarter hold two questions each. The number of needles per row is log-uniform
    between 1/128 and 1/4 of the slots, at most 768. A question picks any needle before it. Half of the rows keep only the first
    question about a needle, since earlier answers are nearer places to copy from.
    """
    device = generator.device
    beginning, slots = make_haystack(batch, num_tokens, generator)
    num_slots = slots.shape[1]
    most = min(num_slots // 4, MAX_NEEDLES)
    fewest = max(1, most // 32)
    draw = torch.rand(batch, generator=generator, device=device)
    num_needles = (fewest * torch.exp(draw * math.log((most + 1) / fewest))).long().clamp(max=most)[:, None]

    # The first slot always holds a needle, so every question has one before it.
    rank = torch.rand(batch, num_slots, generator=generator, device=device)
    rank[:, 0] = -1
    order = rank.argsort(dim=1)
    is_needle_slot = order.argsort(dim=1) < num_needles
    needles_so_far = is_needle_slot.cumsum(dim=1)
    records = draw_records(batch, most, generator)
    own_needle = (needles_so_far - 1)[..., None].expand(-1, -1, RECORD_TOKENS)
    needle_halves = torch.stack([records.gather(1, own_needle), draw_short_sentences((batch, num_slots), generator)], dim=2)
    slots = torch.where(is_needle_slot[..., None, None], needle_halves, slots)

    chosen = num_needles + torch.arange(num_slots // 4, device=device)
    query_slots = order.gather(1, chosen).sort(dim=1).values
    available = needles_so_far.gather(1, query_slots).repeat_interleave(2, dim=1)
    draw = torch.rand(available.shape, generator=generator, device=device)
    asked_needle = (draw * available).long().clamp(max=available - 1)
    num_questions = asked_needle.shape[1]
    question = torch.arange(num_questions, device=device).expand(batch, -1)
    first = torch.full((batch, most), num_questions, device=device).scatter_reduce(1, asked_needle, question, "amin")
    is_first = first.gather(1, asked_needle) == question
    keeps_repeats = torch.rand(batch, 1, generator=generator, device=device) < 0.5
    is_asked = is_first | keeps_repeats

    questions = records.gather(1, asked_needle[..., None].expand(-1, -1, RECORD_TOKENS))
    questions[..., 0] = TOKEN_IDS["QUERY"]
    targets = questions[..., QUESTION_TOKENS:]
    fillers = draw_short_sentences((batch, num_questions), generator)
    halves = torch.where(is_asked[..., None], questions, fillers).view(batch, -1, 2, RECORD_TOKENS)
    slots.scatter_(1, query_slots[..., None, None].expand_as(halves), halves)

    token_ids = torch.cat([beginning, slots.flatten(1)], dim=1)
    half = torch.arange(2, device=device)
    starts = beginning.shape[1] + SLOT_TOKENS * query_slots[..., None] + RECORD_TOKENS * half
    steps = torch.arange(QUESTION_TOKENS - 1, QUESTION_TOKENS - 1 + ANSWER_TOKENS, device=device)
    positions = starts.flatten(1)[..., None] + steps
    return TrainingBatch(token_ids, positions, targets, is_asked, is_first)
