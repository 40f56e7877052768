"""Records of the lookup tasks, and questions about them.

Records come in units of four of one kind. A record has 6 tokens, a question with its answer 6 or 12:

==========  ========================  ===============================  ==========================================
kind        a unit's four records     a question                       its answer
==========  ========================  ===============================  ==========================================
needles     ``KEY k v v v v``         ``QUERY k``                      the four values of the record
(needles)   four keys                 ``ASK k k k k``                  the first value of each record, in that order
many        ``MANY k v in town .``    ``ALL k``                        the four values of the key, in any order
chain       ``SET v w in town .``     ``TRACK v``                      the four variables that follow, link by link
facts       ``FACT s r v v .``        ``WHO s r``                      the two values of that subject and relation
==========  ========================  ===============================  ==========================================

Facts of a unit are two subjects by two relations that all units share, so neither finds the record without the other. Otherwise
keys, subjects, values and variables differ between records.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.ruler_model.vocabulary import FIRST_KEY, FIRST_VALUE, NUM_KEYS, NUM_VALUES, TOKEN_IDS

NEEDLES, MANY, CHAIN, FACTS = range(4)
PARTS = 4
NUM_RELATIONS = 16
_VALUES_OF_UNIT = 20


@dataclass(frozen=True)
class Units:
    """Units of four records.

    Attributes
    ----------
    kind : Tensor, (batch, count), int64
        ``NEEDLES``, ``MANY``, ``CHAIN`` or ``FACTS``.
    keys : Tensor, (batch, count, 4), int64
    relations : Tensor, (batch, count, 2), int64
    values : Tensor, (batch, count, 20), int64
    """

    kind: Tensor
    keys: Tensor
    relations: Tensor
    values: Tensor

    def records(self) -> Tensor:
        """The records, (batch, count, 4, 6) int64."""
        part = torch.arange(PARTS, device=self.kind.device)
        shape = (*self.kind.shape, PARTS)
        values = self.values
        tail = _words(shape, self.kind.device)
        firsts = [_marker(name, shape, self.kind.device) for name in ("KEY", "MANY", "SET", "FACT")]
        one_key = self.keys[..., :1].expand(shape)
        stop = tail[..., 2:]
        records = torch.stack(
            [
                _join(firsts[0], self.keys, values[..., :16].unflatten(-1, (4, 4))),
                _join(firsts[1], one_key, values[..., :4], tail),
                _join(firsts[2], values[..., :4], values[..., 1:5], tail),
                _join(
                    firsts[3],
                    self.keys[..., part // 2],
                    self.relations[..., part % 2],
                    values[..., :8].unflatten(-1, (4, 2)),
                    stop,
                ),
            ],
            dim=2,
        )
        return _choose(records, self.kind)

    def take(self, index: Tensor) -> "Units":
        """The units ``index``, (batch, questions), of each row."""
        parts = (self.kind, self.keys, self.relations, self.values)
        return Units(*(_take(part, index) for part in parts))


def draw_units(batch: int, count: int, kind: Tensor, generator: torch.Generator) -> Units:
    """Draw ``count`` <= 200 units per row, of the kinds (batch, count)."""
    device = generator.device
    order = torch.rand(batch, NUM_KEYS - NUM_RELATIONS, generator=generator, device=device).argsort(1)
    keys = FIRST_KEY + NUM_RELATIONS + order[:, : PARTS * count].unflatten(1, (count, PARTS))
    order = torch.rand(batch, NUM_VALUES, generator=generator, device=device).argsort(1)
    values = FIRST_VALUE + order[:, : _VALUES_OF_UNIT * count].unflatten(1, (count, _VALUES_OF_UNIT))
    first = torch.randint(NUM_RELATIONS, (batch, count), generator=generator, device=device)
    step = torch.randint(1, NUM_RELATIONS, (batch, count), generator=generator, device=device)
    relations = FIRST_KEY + torch.stack([first, (first + step) % NUM_RELATIONS], dim=-1)
    return Units(kind, keys, relations, values)


def short_questions(units: Units, part: Tensor, generator: torch.Generator) -> Tensor:
    """Questions with answers, (batch, count, 6) int64, about record `part`, (batch, count), of each unit.

    ``MANY`` and ``CHAIN`` ask about the whole unit.
    """
    shape, device = part.shape, part.device
    markers = [_marker(name, shape, device) for name in ("QUERY", "ALL", "TRACK", "WHO")]
    values = units.values
    own_key = _take_last(units.keys, part)
    own_values = _take(values[..., :16].unflatten(-1, (4, 4)).flatten(0, 1), part.flatten()[:, None])[:, 0].view(*shape, 4)
    pair = _take(values[..., :8].unflatten(-1, (4, 2)).flatten(0, 1), part.flatten()[:, None])[:, 0].view(*shape, 2)
    order = torch.rand(*shape, PARTS, generator=generator, device=device).argsort(-1)
    shuffled = values[..., :4].gather(-1, order)
    stop = _words((*shape,), device)[..., 2:]
    questions = torch.stack(
        [
            _join(markers[0], own_key, own_values),
            _join(markers[1], units.keys[..., 0], shuffled),
            _join(markers[2], values[..., 0], values[..., 1:5]),
            _join(markers[3], _take_last(units.keys, part // 2), _take_last(units.relations, part % 2), pair, stop),
        ],
        dim=2,
    )
    return _choose(questions, units.kind)


def long_questions(units: Units, generator: torch.Generator) -> Tensor:
    """Questions with answers, (batch, count, 12) int64, for the four keys of each unit of needles."""
    shape, device = units.kind.shape, units.kind.device
    order = torch.rand(*shape, PARTS, generator=generator, device=device).argsort(-1)
    answers = units.values[..., 0:16:4].gather(-1, order)
    return _join(_marker("ASK", shape, device), units.keys.gather(-1, order), answers, _words(shape, device))


def _words(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return _word_ids(device).expand(*shape, 3)


@functools.cache
def _word_ids(device: torch.device) -> Tensor:
    return torch.tensor([TOKEN_IDS[word] for word in ("in", "town", ".")], device=device)


def _marker(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, TOKEN_IDS[name], device=device)


def _join(*parts: Tensor) -> Tensor:
    most = max(part.ndim for part in parts)
    return torch.cat([part if part.ndim == most else part[..., None] for part in parts], dim=-1)


def _choose(parts: Tensor, kind: Tensor) -> Tensor:
    """``parts[b, u, kind[b, u]]``."""
    index = kind.view(*kind.shape, *[1] * (parts.ndim - 2)).expand(*kind.shape, 1, *parts.shape[3:])
    return parts.gather(2, index).squeeze(2)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """``values[b, index[b, q]]``."""
    shape = values.shape[2:]
    return values.gather(1, index.view(*index.shape, *[1] * len(shape)).expand(*index.shape, *shape))


def _take_last(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index[..., None])[..., 0]
