"""Lists of words, after RULER's two tasks on frequencies.

``COMMON``: the four words that are ten times as frequent as every other (RULER: ten words, 30 times each among words
that occur 3 times). ``FREQUENT``: the three most frequent words where rank ``r`` has a share proportional to ``1 /
r**2``. Counts are exact, words shuffled, answers in any order.
"""

import torch
from torch import Tensor

from bench.ruler_model.vocabulary import FIRST_VALUE, NUM_VALUES

COMMON_WORDS, FREQUENT_WORDS = 4, 3
TOKENS_A_WORD = 16
_TIMES = 10
_MAX_WORDS = 1000
_RANKS = 1024


def other_words(num_tokens: int) -> int:
    """Uncommon words in a list of ``COMMON``: RULER's number at that length, at most 1,000."""
    return min(max(num_tokens // TOKENS_A_WORD, 8), _MAX_WORDS)


def draw_ranks(num_words: int, others: Tensor, is_common: Tensor, generator: torch.Generator) -> Tensor:
    """Draw shuffled lists of ranks, (batch, num_words) int64; rank 0 is the most frequent word.

    `others`, (batch,) int64, holds the uncommon words of each list of ``COMMON``; `is_common`, (batch,) bool, marks those
    lists.
    """
    device, batch = generator.device, len(is_common)
    order = torch.rand(batch, num_words, generator=generator, device=device).argsort(1)
    draw = (order.double() + 0.5) / num_words
    often = COMMON_WORDS * _TIMES
    of_common = draw * (often + others[:, None])
    ranks = (of_common / _TIMES).long().where(of_common < often, COMMON_WORDS + (of_common - often).long())
    shares = torch.arange(1, _MAX_WORDS + 1, device=device, dtype=torch.float64) ** -2
    zeta = torch.searchsorted((shares / shares.sum()).cumsum(0), draw).clamp(max=_MAX_WORDS - 1)
    return ranks.where(is_common[:, None], zeta)


def draw_words(batch: int, generator: torch.Generator) -> Tensor:
    """The word of every rank, (batch, 1024) int64."""
    order = torch.rand(batch, NUM_VALUES, generator=generator, device=generator.device).argsort(1)
    return FIRST_VALUE + order[:, :_RANKS]
