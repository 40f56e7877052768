"""Prompts of one task each, for evaluation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.retriever.task import draw_short_sentences, make_haystack
from bench.ruler_model.lists import COMMON_WORDS, FREQUENT_WORDS, draw_ranks, draw_words, other_words
from bench.ruler_model.units import CHAIN, FACTS, MANY, NEEDLES, PARTS, draw_units, long_questions, short_questions
from bench.ruler_model.vocabulary import TOKEN_IDS


@dataclass(frozen=True)
class Lookup:
    """A task of records in a haystack.

    Attributes
    ----------
    kind : int
        Of the records.
    units : int
        Units of four records, as far as half of the slots hold them.
    answer : (int, int)
        Where the answer begins and ends in a question with its answer.
    alone : bool
        True if the haystack holds only the record asked for.
    """

    kind: int
    units: int
    answer: tuple[int, int] = (2, 6)
    alone: bool = False


LOOKUPS = {
    "single": Lookup(NEEDLES, 1, alone=True),
    "multi_key_8": Lookup(NEEDLES, 2),
    "multi_key_64": Lookup(NEEDLES, 16),
    "multi_key_512": Lookup(NEEDLES, 128),
    "multi_value": Lookup(MANY, 8),
    "multi_query": Lookup(NEEDLES, 8, (5, 9)),
    "tracking": Lookup(CHAIN, 8),
    "facts": Lookup(FACTS, 16, (3, 5)),
}
TASKS = (*LOOKUPS, "common", "frequent")
IN_ANY_ORDER = ("multi_value", "common", "frequent")
_SEED_STEP = 1_000_003


@dataclass(frozen=True)
class Prompts:
    """Prompts of one task and length.

    Attributes
    ----------
    task : str
    token_ids : Tensor, (count, num_tokens), int64
        Each ends with its question.
    answers : Tensor, (count, answer_tokens), int64
    """

    task: str
    token_ids: Tensor
    answers: Tensor

    def parts_right(self, found: Tensor) -> Tensor:
        """Right tokens of each answer, (count,) int64.

        `found`, (count, at least answer_tokens), are greedy tokens. Answers of ``IN_ANY_ORDER`` are right in any order, each
        token once.
        """
        found = found[:, : self.answers.shape[1]].to(self.answers.device)
        if self.task in IN_ANY_ORDER:
            return (self.answers[:, :, None] == found[:, None]).any(2).sum(1)
        return (self.answers == found).sum(1)


def make_prompts(task: str, num_tokens: int, count: int, seed: int = 0, device: str | torch.device = "cpu") -> Prompts:
    """Draw `count` prompts of a task in ``TASKS``, of `num_tokens` >= 256 with the question, on `device`.

    `seed` determines the prompts on one kind of device. ValueError for an unknown task or a prompt that is too short.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {task!r}")
    if num_tokens < 256:
        raise ValueError(f"num_tokens must be at least 256; got {num_tokens}")
    generator = torch.Generator(device).manual_seed(_SEED_STEP * (seed + 1) + TASKS.index(task))
    if task in LOOKUPS:
        return _lookups(task, num_tokens, count, generator)
    return _lists(task, num_tokens, count, generator)


def _lookups(task: str, num_tokens: int, count: int, generator: torch.Generator) -> Prompts:
    plan, device = LOOKUPS[task], generator.device
    question_tokens, end = plan.answer
    beginning, slots = make_haystack(count, num_tokens - question_tokens, generator)
    num_slots = slots.shape[1]
    num_units = min(plan.units, num_slots // (2 * PARTS))
    units = draw_units(count, num_units, torch.full((count, num_units), plan.kind, device=device), generator)
    places = torch.rand(count, num_slots, generator=generator, device=device).argsort(1)[:, : PARTS * num_units]
    places = places.unflatten(1, (num_units, PARTS)).sort(-1).values.flatten(1)
    halves = torch.stack([units.records(), draw_short_sentences((count, num_units, PARTS), generator)], dim=3).flatten(1, 2)
    part = torch.randint(PARTS, (count, 1), generator=generator, device=device)
    if plan.alone:
        halves = halves.gather(1, part[..., None, None].expand(-1, -1, *halves.shape[2:]))
        places = places[:, :1]
    slots.scatter_(1, places[..., None, None].expand_as(halves), halves)
    target = units.take(torch.zeros_like(part))
    if task == "multi_query":
        question = long_questions(target, generator)[:, 0]
    else:
        question = short_questions(target, part, generator)[:, 0]
    token_ids = torch.cat([beginning, slots.flatten(1), question[:, :question_tokens]], dim=1)
    return Prompts(task, token_ids, question[:, question_tokens:end])


def _lists(task: str, num_tokens: int, count: int, generator: torch.Generator) -> Prompts:
    is_common = torch.full((count,), task == "common", device=generator.device)
    others = torch.full((count,), other_words(num_tokens), device=generator.device)
    words = draw_words(count, generator)
    tokens = words.gather(1, draw_ranks(num_tokens, others, is_common, generator))
    tokens[:, 0] = TOKEN_IDS["<bos>"]
    tokens[:, -1] = TOKEN_IDS["COMMON" if task == "common" else "FREQUENT"]
    return Prompts(task, tokens, words[:, : COMMON_WORDS if task == "common" else FREQUENT_WORDS])
