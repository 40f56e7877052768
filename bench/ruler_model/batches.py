"""Training batches: rows of lookups, all of one length, and rows of lists, of several lengths."""

import random

import torch

from bench.ruler_model.lists import list_rows
from bench.ruler_model.rows import Rows, lookup_rows

_PARTS = 4
_SHORTEST_LIST = 512


def make_batch(batch_tokens: int, num_tokens: int, generator: torch.Generator, seed: int, list_share: float = 0.5) -> list[Rows]:
    """Draw rows of about ``batch_tokens`` tokens in all, always as many for the same first two arguments.

    Lists are taught at all lengths up to that of the lookups at once: what short ones teach is not forgotten, and many short
    ones have more questions than few long ones.

    Parameters
    ----------
    batch_tokens : int
    num_tokens : int
        Length of a row of lookups in tokens, at least 193. There is at least one.
    generator : torch.Generator
        Its device is the device of the result. The host never waits for it.
    seed : int
        Draws the lengths of the lists and where their questions stand.
    list_share : float
        Share of the tokens that are lists, in quarters; as far as there is room.

    Returns
    -------
    list of Rows
        Rows of one length each, lookups first.
    """
    draw = random.Random(seed)
    part = batch_tokens // _PARTS
    lists = round(_PARTS * list_share)
    count = max(1, (batch_tokens - lists * part) // num_tokens)
    lists = min(lists, max(0, batch_tokens - count * num_tokens) // part)
    rows = [lookup_rows(count, num_tokens, generator)]
    while lists:
        # two parts in one, now and then, for the longest lists
        parts = 2 if lists > 1 and draw.random() < 0.2 else 1
        lists -= parts
        longest = min(num_tokens, parts * part)
        lengths = [longest] if parts > 1 else _lengths(longest)
        length = draw.choice(lengths)
        rows.append(list_rows(parts * part // length, length, generator, draw.randrange(2**31)))
    return rows


def _lengths(longest: int) -> list[int]:
    """Return powers of two, from 512 to the longest one."""
    found = [longest]
    while found[-1] >= 2 * _SHORTEST_LIST:
        found.append(found[-1] // 2)
    return found
