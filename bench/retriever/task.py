"""The retrieval task: a haystack of repeated sentences, needles in it, and questions about the needles.

A prompt is ``<bos>``, a piece of a sentence, and then slots of 12 tokens. A slot holds a haystack sentence, or a
needle ``KEY k17 v301 v4 v77 v12`` and a short sentence of 6 tokens. A question is ``QUERY k17``; its answer is
the four value tokens of the needle with that key.
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
    """Return the sentences' halves of 6 tokens; copied to a device once, since the host waits for such a copy."""
    ids = torch.tensor([[TOKEN_IDS[word] for word in sentence.split()] for sentence in sentences])
    return ids.view(len(sentences), -1, RECORD_TOKENS).to(device)


@dataclass(frozen=True)
class Prompt:
    """One prompt, ending with its first question, and all its questions with their right answers.

    Attributes
    ----------
    token_ids : Tensor, (prompt_tokens,), int64
        What is prefilled. The last two tokens are the first question, so the logits of the last position choose
        the first token of the first answer.
    questions : Tensor, (num_queries, 2), int64
        ``QUERY`` and a key, for each question. The keys differ.
    answers : Tensor, (num_queries, 4), int64
        The value tokens of the needle asked for.
    needle_positions : Tensor, (num_queries,), int64
        Where in ``token_ids`` the needle asked for begins, in tokens.
    """

    token_ids: Tensor
    questions: Tensor
    answers: Tensor
    needle_positions: Tensor

    def with_answers(self) -> Tensor:
        """Return the prompt, its first answer, and every further question with its answer, as one row of tokens.

        Answer ``i`` is predicted at positions ``prompt_tokens - 1 + 6 * i`` to ``prompt_tokens + 2 + 6 * i``.

        Returns
        -------
        Tensor, (prompt_tokens + 6 * num_queries - 2,), int64
        """
        records = torch.cat([self.questions, self.answers], dim=1).flatten()
        return torch.cat([self.token_ids, records[QUESTION_TOKENS:]])

    def text(self) -> str:
        """Return the prompt as words separated by single spaces; the tokenizer turns it back into ``token_ids``."""
        return text_of(self.token_ids)


def text_of(token_ids: Tensor) -> str:
    """Return tokens as words separated by single spaces.

    Parameters
    ----------
    token_ids : Tensor, (num_tokens,), int64
    """
    return " ".join(TOKENS[token_id] for token_id in token_ids.tolist())


def make_haystack(batch: int, num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw rows of haystack without needles: a beginning of 1 to 12 tokens, and slots.

    Parameters
    ----------
    batch : int
        Number of rows.
    num_tokens : int
        Length of a row in tokens, at least 13.
    generator : torch.Generator
        Its device is the device of the result.

    Returns
    -------
    beginning : Tensor, (batch, num_tokens - 12 * num_slots), int64
        ``<bos>`` and the end of a sentence.
    slots : Tensor, (batch, num_slots, 2, 6), int64
        Sentences drawn independently, each as two halves of 6 tokens.
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
    """Draw needles whose keys differ within a row, with four independent values each.

    Parameters
    ----------
    batch : int
    count : int
        Needles per row, at most 1,024, the number of keys.
    generator : torch.Generator

    Returns
    -------
    Tensor, (batch, count, 6), int64
        ``KEY k v1 v2 v3 v4``.
    """
    device = generator.device
    keys = torch.rand(batch, NUM_KEYS, generator=generator, device=device).argsort(dim=1)[:, :count, None]
    values = torch.randint(NUM_VALUES, (batch, count, ANSWER_TOKENS), generator=generator, device=device)
    words = torch.full_like(keys, TOKEN_IDS["KEY"])
    return torch.cat([words, FIRST_KEY + keys, FIRST_VALUE + values], dim=2)


def draw_short_sentences(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw short sentences independently: int64 of shape ``(*shape, 6)``."""
    choice = torch.randint(len(SHORT_SENTENCES), shape, generator=generator, device=generator.device)
    return _sentence_ids(SHORT_SENTENCES, generator.device)[choice].squeeze(-2)


def make_prompt(prompt_tokens: int, num_needles: int = 1, num_queries: int = 1, seed: int = 0) -> Prompt:
    """Make a haystack with needles at random places that ends with a question about one of them.

    Parameters
    ----------
    prompt_tokens : int
        Length of the prompt in tokens, its first question included; at least 15, and enough for 12 tokens a needle.
    num_needles : int
        Needles in the haystack, 1 to 1,024.
    num_queries : int
        Questions, 1 to ``num_needles``, each about another needle.
    seed : int
        The same arguments give the same prompt.

    Returns
    -------
    Prompt
        On the CPU.

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
        needle_positions=beginning.shape[1] + SLOT_TOKENS * places[:num_queries],
    )
