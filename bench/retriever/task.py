"""A haystack of sentences, needles in it, and questions.

A prompt is ``<bos>``, a piece of a sentence, and slots of 12 tokens: a sentence, or a needle ``KEY k17 v301 v4 v77 v12`` and a
short sentence of 6 tokens. The question ``QUERY k17`` asks for the four values.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.retriever.vocabulary import (
    FIRST_KEY,
    FIRST_VALUE,
    NUM_KEYS,
    NUM_VALUES,
    SENTENCES,
    SHORT_SENTENCES,
    TOKEN_IDS,
    TOKENS,
)

SLOT_TOKENS = 12
RECORD_TOKENS = 6
QUESTION_TOKENS = 2
ANSWER_TOKENS = 4


@functools.cache
def _sentence_ids(sentences: tuple[str, ...], device: torch.device) -> Tensor:
    """The sentences' halves of 6 tokens; cached per device, since copying waits for the host."""
    ids = torch.tensor([[TOKEN_IDS[word] for word in sentence.split()] for sentence in sentences])
    return ids.view(len(sentences), -1, RECORD_TOKENS).to(device)


@dataclass(frozen=True)
class Prompt:
    """A prompt that ends with its first question, and all questions with answers.

    Attributes
    ----------
    token_ids : Tensor, (prompt_tokens,), int64
        The last position predicts the first token of the first answer.
    questions : Tensor, (num_queries, 2), int64
        ``QUERY`` and a key; the keys differ.
    answers : Tensor, (num_queries, 4), int64
    """

    token_ids: Tensor
    questions: Tensor
    answers: Tensor

    def text(self) -> str:
        """The prompt as words, which the tokenizer turns back into ``token_ids``."""
        return text_of(self.token_ids)


def text_of(token_ids: Tensor) -> str:
    """Tokens (num_tokens,) as words separated by spaces."""
    return " ".join(TOKENS[token_id] for token_id in token_ids.tolist())


def make_haystack(batch: int, num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `batch` rows of haystack of `num_tokens` >= 13 without needles, on the generator's device.

    Returns
    -------
    beginning : Tensor, (batch, num_tokens - 12 * num_slots), int64
        ``<bos>`` and the end of a sentence.
    slots : Tensor, (batch, num_slots, 2, 6), int64
        Independent sentences as two halves.
    """
    device = generator.device
    num_slots = (num_tokens - 1) // SLOT_TOKENS
    beginning_tokens = num_tokens - num_slots * SLOT_TOKENS
    choice = torch.randint(len(SENTENCES), (batch, num_slots + 1), generator=generator, device=device)
    sentences = _sentence_ids(SENTENCES, device)[choice]  # (batch, num_slots + 1, 2, 6)
    beginning = sentences[:, 0].flatten(1)[:, SLOT_TOKENS - beginning_tokens :].clone()
    beginning[:, 0] = TOKEN_IDS["<bos>"]
    return beginning, sentences[:, 1:].contiguous()


def draw_records(batch: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw needles ``KEY k v1 v2 v3 v4``, (batch, count, 6) int64; keys differ within a row, count <= 1,024."""
    device = generator.device
    keys = torch.rand(batch, NUM_KEYS, generator=generator, device=device).argsort(dim=1)[:, :count, None]
    values = torch.randint(NUM_VALUES, (batch, count, ANSWER_TOKENS), generator=generator, device=device)
    words = torch.full_like(keys, TOKEN_IDS["KEY"])
    return torch.cat([words, FIRST_KEY + keys, FIRST_VALUE + values], dim=2)


def draw_short_sentences(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Independent short sentences, ``(*shape, 6)`` int64."""
    choice = torch.randint(len(SHORT_SENTENCES), shape, generator=generator, device=generator.device)
    return _sentence_ids(SHORT_SENTENCES, generator.device)[choice].squeeze(-2)


def make_prompt(prompt_tokens: int, num_needles: int = 1, num_queries: int = 1, seed: int = 0) -> Prompt:
    """Make a prompt of `prompt_tokens` with needles at random places, on the CPU.

    Parameters
    ----------
    prompt_tokens : int
        >= 15, and 12 per needle; the first question included.
    num_needles : int
        1 to 1,024.
    num_queries : int
        1 to `num_needles`, each about another needle.
    seed : int
        Determines the prompt.

    Example
    -------
    >>> prompt = make_prompt(64, num_needles=2, num_queries=2, seed=1)
    >>> len(prompt.token_ids), prompt.text().split()[-2:] == text_of(prompt.questions[0]).split()
    (64, True)
    """
    num_slots = (prompt_tokens - QUESTION_TOKENS - 1) // SLOT_TOKENS
    if not 1 <= num_needles <= min(num_slots, NUM_KEYS):
        raise ValueError(
            f"num_needles must be 1 to {min(max(num_slots, 0), NUM_KEYS)} in a prompt of {prompt_tokens} tokens; "
            f"got {num_needles}"
        )
    if not 1 <= num_queries <= num_needles:
        raise ValueError(f"num_queries must be 1 to num_needles ({num_needles}); got {num_queries}")
    generator = torch.Generator().manual_seed(seed)
    beginning, slots = make_haystack(1, prompt_tokens - QUESTION_TOKENS, generator)
    needles = draw_records(1, num_needles, generator)[0]
    places = torch.randperm(num_slots, generator=generator)[:num_needles]
    slots[0, places, 0] = needles
    slots[0, places, 1] = draw_short_sentences((num_needles,), generator)
    questions = needles[:num_queries, :QUESTION_TOKENS].clone()
    questions[:, 0] = TOKEN_IDS["QUERY"]
    return Prompt(
        token_ids=torch.cat([beginning[0], slots[0].flatten(), questions[0]]),
        questions=questions,
        answers=needles[:num_queries, QUESTION_TOKENS:].clone(),
    )
