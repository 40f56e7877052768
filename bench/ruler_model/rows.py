"""Training rows of the lookup tasks: records of all kinds and questions about them, over the whole length."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.retriever.task import RECORD_TOKENS, SLOT_TOKENS, draw_short_sentences, make_haystack
from bench.ruler_model.units import (
    FACTS,
    LONG_FIRST,
    MANY,
    MAX_UNITS,
    NEEDLES,
    PARTS,
    SHORT_FIRST,
    Units,
    draw_units,
    long_questions,
    short_questions,
)

TASKS = ("single", "multi_value", "tracking", "facts", "multi_query", "common", "frequent")
"""The tasks that training tells apart; the first four in the order of the kinds of units."""

MULTI_QUERY = TASKS.index("multi_query")
MIN_TOKENS = 1 + 16 * SLOT_TOKENS
_MOST_UNITS = 192
_NEEDLE_SHARE = 0.4


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, and the positions at which answers are predicted.

    Attributes
    ----------
    token_ids : Tensor, (batch, num_tokens), int64
    positions : Tensor, (batch, num_questions, 4), int64
        The positions whose *next* token is an answer token.
    targets : Tensor, (batch, num_questions, 4, 4), int64
        The tokens that are right there, padded with -1; the first is the one in the row.
    is_answer : Tensor, (batch, num_questions, 4), bool
        False for all four of a question that is not in the row.
    task : Tensor, (batch, num_questions), int64
        Index in ``TASKS``.
    is_first : Tensor, (batch, num_questions), bool
        True if no earlier question of the row asks the same. (A question for four needles counts as asking for the first.)
    """

    token_ids: Tensor
    positions: Tensor
    targets: Tensor
    is_answer: Tensor
    task: Tensor
    is_first: Tensor


def lookup_rows(batch: int, num_tokens: int, generator: torch.Generator) -> Rows:
    """Draw rows in which up to a third of the slots hold records and a third hold questions.

    A slot of 12 tokens holds a record and a short sentence, two short questions, a long question, or a sentence. Each row has
    its own number of units, 1/32 of the most to the most (at most 192), rather many than few. A question asks about any unit
    whose records all come before it. Half of the rows hold units of one kind only, and half keep only the first question
    about each record, since an earlier answer is a nearer place to copy from.

    Parameters
    ----------
    batch : int
    num_tokens : int
        Length of a row in tokens, at least 193.
    generator : torch.Generator
        Its device is the device of the result. The host never waits for it.

    Returns
    -------
    Rows
    """
    device = generator.device
    beginning, slots = make_haystack(batch, num_tokens, generator)
    num_slots = slots.shape[1]
    most = min(num_slots // 12, _MOST_UNITS, MAX_UNITS)
    num_asking = num_slots // 3
    units = draw_units(batch, most, _draw_kinds(batch, most, generator), generator)
    fewest = max(1, most // 32)
    draw = 1 - _uniform((batch, 1), generator).square()
    count = (fewest * torch.exp(draw * math.log((most + 1) / fewest))).long().clamp(max=most)
    exists = torch.arange(most, device=device) < count

    record_slots, asking_slots = _places(batch, most, num_asking, num_slots, generator)
    records = torch.stack([units.records(), draw_short_sentences((batch, most, PARTS), generator)], dim=3).flatten(1, 2)
    _put(slots, record_slots.flatten(1), records, exists.repeat_interleave(PARTS, 1))

    # Units in the order in which they are complete; those that do not exist never are.
    complete, order = record_slots[..., -1].where(exists, num_slots).sort(1)
    available = torch.searchsorted(complete, asking_slots).repeat_interleave(2, 1)  # (batch, 2 * num_asking)
    pick = (_uniform(available.shape, generator) * available).long().clamp(max=most - 1)
    index = order.gather(1, pick.minimum((available - 1).clamp(min=0)))
    asked = units.take(index)
    part = torch.randint(PARTS, index.shape, generator=generator, device=device)
    part = part.where((asked.kind == NEEDLES) | (asked.kind == FACTS), 0)
    is_long = (asked.kind[:, ::2] == NEEDLES) & (_uniform(asking_slots.shape, generator) < 0.5)
    is_long, is_second = is_long.repeat_interleave(2, 1), torch.arange(2, device=device).repeat(num_asking) == 1
    part = part.where(~is_long, 0)

    is_there = (available > 0) & ~(is_long & is_second)
    is_first = _is_first(index * PARTS + part, is_there, most * PARTS)
    keeps_repeats = _uniform((batch, 1), generator) < 0.5
    is_there &= is_first | keeps_repeats

    short = short_questions(asked, part, generator)
    longs, long_targets = long_questions(_every_second(asked), generator)
    long_targets = long_targets.repeat_interleave(2, 1)
    fillers = draw_short_sentences(tuple(is_there.shape), generator)
    halves = short.token_ids.where(is_there[..., None], fillers).unflatten(1, (num_asking, 2))
    whole = (is_long & is_there)[:, ::2, None, None]
    halves = longs.unflatten(-1, (2, RECORD_TOKENS)).where(whole, halves)
    slots.scatter_(1, asking_slots[..., None, None].expand_as(halves), halves)

    starts = beginning.shape[1] + SLOT_TOKENS * asking_slots[..., None] + RECORD_TOKENS * torch.arange(2, device=device)
    first = torch.where(is_long, LONG_FIRST, SHORT_FIRST) + starts.flatten(1)
    return Rows(
        token_ids=torch.cat([beginning, slots.flatten(1)], dim=1),
        positions=(first[..., None] + torch.arange(4, device=device)).clamp(max=num_tokens - 2),
        targets=long_targets.where(is_long[..., None, None], short.targets),
        is_answer=(short.is_answer | is_long[..., None]) & is_there[..., None],
        task=asked.kind.where(~is_long, MULTI_QUERY),
        is_first=is_first,
    )


def _uniform(shape: tuple[int, ...] | torch.Size, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device)


def _draw_kinds(batch: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw kinds of units; half of the rows hold one kind only."""
    draw = _uniform((batch, count), generator)
    draw = draw.where(_uniform((batch, 1), generator) < 0.5, draw[:, :1])
    others = ((draw - _NEEDLE_SHARE) / (1 - _NEEDLE_SHARE) * 3).long().clamp(0, 2)
    return (MANY + others).where(draw >= _NEEDLE_SHARE, NEEDLES)


def _places(batch: int, units: int, asking: int, num_slots: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw different slots for all records, in the order of their parts, and for questions, in order.

    The records of half of the units lie anywhere, those of the others within a part of the row.

    Returns
    -------
    record_slots : Tensor, (batch, units, 4), int64
    asking_slots : Tensor, (batch, asking), int64
    """
    width = _uniform((batch, units, 1), generator) ** 3
    width = width.where(_uniform((batch, units, 1), generator) < 0.5, 1.0)
    left = _uniform((batch, units, 1), generator) * (1 - width)
    wanted = left + width * _uniform((batch, units, PARTS), generator)
    others = _uniform((batch, num_slots - PARTS * units), generator)
    place = torch.cat([wanted.flatten(1), others], dim=1).argsort(1).argsort(1)
    record_slots = place[:, : PARTS * units].unflatten(1, (units, PARTS)).sort(-1).values
    asking_slots = place[:, PARTS * units : PARTS * units + asking].sort(-1).values
    return record_slots, asking_slots.contiguous()


def _put(slots: Tensor, places: Tensor, halves: Tensor, exists: Tensor) -> None:
    """Write ``halves`` into the slots ``places``, where they exist."""
    index = places[..., None, None].expand_as(halves)
    slots.scatter_(1, index, halves.where(exists[..., None, None], slots.gather(1, index)))


def _is_first(what: Tensor, is_there: Tensor, most: int) -> Tensor:
    number = torch.arange(what.shape[1], device=what.device).expand_as(what)
    number = number.where(is_there, what.shape[1])
    first = torch.full((what.shape[0], most), what.shape[1], device=what.device).scatter_reduce(1, what, number, "amin")
    return (first.gather(1, what) == number) & is_there


def _every_second(units: Units) -> Units:
    return Units(units.kind[:, ::2], units.keys[:, ::2], units.relations[:, ::2], units.values[:, ::2])
