"""Lists of words, and the question for the most frequent ones.

A list is a row of value tokens. ``COMMON`` asks for the four words that are ten times as frequent as every other one,
``FREQUENT`` for the three most frequent of a list in which the word of rank ``r`` has a share proportional to ``1 / r**2``
(RULER's zeta distribution); the answers may come in any order. What is right is counted on the tokens of the row.
"""

import random

import torch
from torch import Tensor

from bench.ruler_model.rows import TASKS, Rows
from bench.ruler_model.units import targets_of
from bench.ruler_model.vocabulary import END_OF_VALUES, FIRST_VALUE, NUM_VALUES, TOKEN_IDS

COMMON_WORDS, FREQUENT_WORDS = 4, 3
_TIMES = 10
_MOST_WORDS = 1000
_QUESTION_TOKENS = 5


def draw_words(batch: int, num_words: int, is_common: Tensor, generator: torch.Generator) -> Tensor:
    """Draw lists of words, (batch, num_words) int64.

    Parameters
    ----------
    batch, num_words : int
    is_common : Tensor, (batch,), bool
        Lists for ``COMMON``; the others are for ``FREQUENT``.
    generator : torch.Generator
    """
    device = generator.device
    rare = min(max(num_words // 3, 8), _MOST_WORDS)
    draw = torch.rand(batch, num_words, generator=generator, device=device, dtype=torch.float64)
    of_common = draw * (COMMON_WORDS * _TIMES + rare)
    extra = COMMON_WORDS + (of_common - COMMON_WORDS * _TIMES).long()
    ranks = (of_common / _TIMES).long().where(of_common < COMMON_WORDS * _TIMES, extra)
    shares = torch.arange(1, _MOST_WORDS + 1, device=device, dtype=torch.float64) ** -2
    zeta = torch.searchsorted((shares / shares.sum()).cumsum(0), draw).clamp(max=_MOST_WORDS - 1)
    ranks = ranks.where(is_common[:, None], zeta)
    words = torch.rand(batch, NUM_VALUES, generator=generator, device=device).argsort(1)
    return FIRST_VALUE + words.gather(1, ranks)


def most_frequent(token_ids: Tensor, is_common: Tensor) -> tuple[Tensor, Tensor]:
    """Count words.

    Parameters
    ----------
    token_ids : Tensor, (batch, num_tokens), int64
        Tokens that are no values do not count.
    is_common : Tensor, (batch,), bool

    Returns
    -------
    answers : Tensor, (batch, 4), int64
        The most frequent words; for ``FREQUENT`` the last one is not of the answer.
    is_clear : Tensor, (batch,), bool
        False if the last word of the answer is no more frequent than the next one.
    """
    counts = torch.zeros(token_ids.shape[0], END_OF_VALUES + 64, device=token_ids.device)
    counts.scatter_add_(1, token_ids, torch.ones_like(token_ids, dtype=torch.float32))
    top = counts[:, FIRST_VALUE:END_OF_VALUES].topk(COMMON_WORDS + 1, dim=1)
    drops = top.values[:, :-1] > top.values[:, 1:]
    is_clear = torch.where(is_common, drops[:, COMMON_WORDS - 1], drops[:, FREQUENT_WORDS - 1])
    return FIRST_VALUE + top.indices[:, :COMMON_WORDS], is_clear


def list_rows(batch: int, num_tokens: int, generator: torch.Generator, seed: int) -> Rows:
    """Draw rows that are one list each, with a question at the end and in half of the rows two more on the way.

    Parameters
    ----------
    batch : int
    num_tokens : int
        Length of a row in tokens.
    generator : torch.Generator
    seed : int
        Draws where the earlier questions stand, on the host.

    Returns
    -------
    Rows
    """
    device = generator.device
    is_common = torch.rand(batch, generator=generator, device=device) < 0.5
    tokens = draw_words(batch, num_tokens, is_common, generator)
    tokens[:, 0] = TOKEN_IDS["<bos>"]
    has_more = torch.rand(batch, generator=generator, device=device) < 0.5
    at = random.Random(seed)
    starts = [int(num_tokens * at.uniform(0.3, 0.6)), int(num_tokens * at.uniform(0.62, 0.9)), num_tokens - _QUESTION_TOKENS]
    markers = torch.where(is_common, TOKEN_IDS["COMMON"], TOKEN_IDS["FREQUENT"])
    stop = torch.full_like(markers, TOKEN_IDS["."])
    targets, clear = [], []
    for start in starts:
        answers, is_clear = most_frequent(tokens[:, :start], is_common)
        is_there = is_clear & (has_more | (start == starts[-1]))
        answers = shuffle(answers, is_common, generator)
        answers[:, 3] = answers[:, 3].where(is_common, stop)
        question = torch.cat([markers[:, None], answers], dim=1)
        part = tokens[:, start : start + _QUESTION_TOKENS]
        part.copy_(question.where(is_there[:, None], part))
        targets.append(word_targets(answers, is_common))
        clear.append(is_there)
    is_there = torch.stack(clear, dim=1)
    step = torch.arange(4, device=device)
    is_answer = is_there[..., None] & ((step < FREQUENT_WORDS) | is_common[:, None, None])
    position = (torch.tensor(starts)[:, None] + torch.arange(4)).to(device, non_blocking=True)
    task = torch.where(is_common, TASKS.index("common"), TASKS.index("frequent"))
    return Rows(
        token_ids=tokens,
        positions=position.expand(batch, -1, -1),
        targets=torch.stack(targets, dim=1),
        is_answer=is_answer,
        task=task[:, None].expand(-1, len(starts)),
        is_first=is_there & (is_there.cumsum(1) == 1),
    )


def shuffle(answers: Tensor, is_common: Tensor, generator: torch.Generator) -> Tensor:
    """Draw another order of the words of each answer; the fourth of ``FREQUENT`` stays."""
    rank = torch.rand(answers.shape, generator=generator, device=answers.device)
    rank[:, 3] = rank[:, 3].where(is_common, 2.0)
    return answers.gather(1, rank.argsort(1))


def word_targets(answers: Tensor, is_common: Tensor) -> Tensor:
    """Return what is right at each step: any word of the answer that has not been said, (batch, 4, 4)."""
    targets = targets_of(answers, torch.ones_like(is_common)[:, None])
    # of three words, the fourth is not said
    step = torch.arange(4, device=answers.device)
    beyond = (step[:, None] + step >= FREQUENT_WORDS) & (step[:, None] < FREQUENT_WORDS)
    return targets.masked_fill(beyond & ~is_common[:, None, None], -1)
