"""Lists of words, and the question for the most frequent ones, after RULER's two tasks.

A list is a row of value tokens. ``COMMON`` asks for the four words that are ten times as frequent as every other one (RULER:
ten words, 30 times each among words that occur 3 times), ``FREQUENT`` for the three most frequent of a list in which the word
of rank ``r`` has a share proportional to ``1 / r**2`` (RULER's zeta distribution). As there, counts are exact and the words
shuffled; the answers may come in any order.
"""

import random

import torch
from torch import Tensor

from bench.ruler_model.rows import TASKS, Rows
from bench.ruler_model.units import targets_of
from bench.ruler_model.vocabulary import FIRST_VALUE, NUM_VALUES, TOKEN_IDS

COMMON_WORDS, FREQUENT_WORDS = 4, 3
TOKENS_A_WORD = 16
_TIMES = 10
_MOST_WORDS = 1000
_RANKS = 1024
_NO_WORD = _RANKS - 1
_QUESTION_TOKENS = 5


def other_words(num_tokens: int) -> int:
    """Return how many uncommon words a list of ``COMMON`` has: RULER's number at that length, but at most 1,000."""
    return min(max(num_tokens // TOKENS_A_WORD, 8), _MOST_WORDS)


def draw_ranks(num_words: int, others: Tensor, is_common: Tensor, generator: torch.Generator) -> Tensor:
    """Draw shuffled lists of ranks, (batch, num_words) int64; rank 0 is the most frequent word.

    Parameters
    ----------
    num_words : int
    others : Tensor, (batch,), int64
        Uncommon words of each list of ``COMMON``, at most 1,000.
    is_common : Tensor, (batch,), bool
        Lists for ``COMMON``; the others are for ``FREQUENT``.
    generator : torch.Generator
    """
    device, batch = generator.device, len(is_common)
    order = torch.rand(batch, num_words, generator=generator, device=device).argsort(1)
    draw = (order.double() + 0.5) / num_words
    often = COMMON_WORDS * _TIMES
    of_common = draw * (often + others[:, None])
    ranks = (of_common / _TIMES).long().where(of_common < often, COMMON_WORDS + (of_common - often).long())
    shares = torch.arange(1, _MOST_WORDS + 1, device=device, dtype=torch.float64) ** -2
    zeta = torch.searchsorted((shares / shares.sum()).cumsum(0), draw).clamp(max=_MOST_WORDS - 1)
    return ranks.where(is_common[:, None], zeta)


def draw_words(batch: int, generator: torch.Generator) -> Tensor:
    """Draw the word of every rank, (batch, 1024) int64."""
    order = torch.rand(batch, NUM_VALUES, generator=generator, device=generator.device).argsort(1)
    return FIRST_VALUE + order[:, :_RANKS]


def list_rows(batch: int, num_tokens: int, generator: torch.Generator, seed: int) -> Rows:
    """Draw rows that are one list each, with a question at the end and in three quarters of them more on the way.

    A question on the way has the first words of the answer and breaks off; they are the same in all questions of a row, and
    the next one, which is asked for, stands nowhere but in the list: no question can be answered from an earlier one.
    Uncommon words are a sixth to a 24th as many as tokens.

    Parameters
    ----------
    batch : int
    num_tokens : int
        Length of a row in tokens, at least 128.
    generator : torch.Generator
    seed : int
        Draws where the earlier questions stand, on the host.

    Returns
    -------
    Rows
    """
    device = generator.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    is_common = uniform(batch) < 0.5
    others = (num_tokens / (6 * 4 ** uniform(batch))).long().clamp(8, _MOST_WORDS)
    ranks = draw_ranks(num_tokens, others, is_common, generator)
    words = draw_words(batch, generator)
    tokens = words.gather(1, ranks)
    tokens[:, 0] = TOKEN_IDS["<bos>"]
    ranks[:, 0] = _NO_WORD

    starts = _places(num_tokens, random.Random(seed))
    last = torch.where(is_common, COMMON_WORDS, FREQUENT_WORDS) - 1
    answers = _ordered(words[:, :COMMON_WORDS], is_common, uniform(batch, COMMON_WORDS), uniform(batch, 1) < 0.75)
    # How many words of the answer the questions on the way have: mostly two of FREQUENT's three, the third is the hard one.
    given = (uniform(batch) * (last + 1)).long()
    given = given.where(is_common | (uniform(batch) < 0.25), last)
    has_more = uniform(batch) < 0.75
    markers = torch.where(is_common, TOKEN_IDS["COMMON"], TOKEN_IDS["FREQUENT"])
    question = torch.cat([markers[:, None], answers], dim=1)
    step = torch.arange(_QUESTION_TOKENS, device=device)
    for start in starts:
        written = step <= (last + 1)[:, None] if start == starts[-1] else (step <= given[:, None]) & has_more[:, None]
        part = slice(start, start + _QUESTION_TOKENS)
        tokens[:, part] = question.where(written, tokens[:, part])
        ranks[:, part] = ranks[:, part].masked_fill(written, _NO_WORD)

    is_last = torch.arange(len(starts), device=device) == len(starts) - 1
    is_there = _is_clear(ranks, starts, last) & (has_more[:, None] | is_last)
    earlier = is_there.cumsum(1) > 1
    step, given, last = step[:COMMON_WORDS], given[:, None, None], last[:, None, None]
    # Of words that an earlier question of the row has, nothing is to be learned.
    is_asked = (step <= last) & (step >= given * earlier[..., None]) & ((step <= given) | is_last[:, None])
    targets = word_targets(answers, is_common)
    task = torch.where(is_common, TASKS.index("common"), TASKS.index("frequent"))
    positions = torch.tensor(starts)[:, None] + torch.arange(COMMON_WORDS)
    return Rows(
        token_ids=tokens,
        positions=positions.to(device, non_blocking=True).expand(batch, -1, -1),
        targets=targets[:, None].expand(-1, len(starts), -1, -1),
        is_answer=is_there[..., None] & is_asked,
        task=task[:, None].expand(-1, len(starts)),
        is_first=is_there & is_last & ~has_more[:, None],
    )


def _places(num_tokens: int, draw: random.Random) -> list[int]:
    """First tokens of questions: one in each equal part of the second half, and the last one."""
    count = 3 if num_tokens < 1024 else 6 if num_tokens < 8192 else 12
    room = num_tokens // 2 // count - 2 * _QUESTION_TOKENS
    on_the_way = [num_tokens // 2 + index * (num_tokens // 2 // count) + draw.randrange(room) for index in range(count)]
    return [*on_the_way, num_tokens - _QUESTION_TOKENS]


def _ordered(words: Tensor, is_common: Tensor, draw: Tensor, by_count: Tensor) -> Tensor:
    """Return the words of each answer in the order of ``draw``, or ``FREQUENT``'s by count; a dot is the fourth of three."""
    rank = torch.arange(COMMON_WORDS, device=words.device).expand_as(words)
    draw = rank.where(by_count & ~is_common[:, None], draw)
    draw = draw.where(is_common[:, None] | (rank < FREQUENT_WORDS), COMMON_WORDS)
    words = words.where(is_common[:, None] | (rank < FREQUENT_WORDS), TOKEN_IDS["."])
    return words.gather(1, draw.argsort(1))


def _is_clear(ranks: Tensor, starts: list[int], last: Tensor) -> Tensor:
    """Return whether each word of the answer outnumbers every other word before each question, (batch, questions)."""
    batch, num_tokens = ranks.shape
    ends = torch.tensor(starts).to(ranks.device, non_blocking=True)
    part = (torch.arange(num_tokens, device=ranks.device)[:, None] >= ends).sum(1)
    counts = torch.zeros(batch, (len(starts) + 1) * _RANKS, device=ranks.device)
    counts.scatter_add_(1, part * _RANKS + ranks, torch.ones_like(ranks, dtype=torch.float32))
    counts = counts.view(batch, -1, _RANKS)[:, :-1, :_NO_WORD].cumsum(1)
    is_answer = torch.arange(_NO_WORD, device=ranks.device) <= last[:, None, None]
    fewest = counts.masked_fill(~is_answer, torch.inf).amin(-1)
    return fewest > counts.masked_fill(is_answer, -1).amax(-1)


def word_targets(answers: Tensor, is_common: Tensor) -> Tensor:
    """Return what is right at each step: any word of the answer that has not been said, (batch, 4, 4)."""
    targets = targets_of(answers, torch.ones_like(is_common)[:, None])
    # of three words, the fourth is not said
    step = torch.arange(COMMON_WORDS, device=answers.device)
    beyond = (step[:, None] + step >= FREQUENT_WORDS) & (step[:, None] < FREQUENT_WORDS)
    return targets.masked_fill(beyond & ~is_common[:, None, None], -1)
