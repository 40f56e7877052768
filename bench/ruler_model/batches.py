"""Training batches: rows of lookups and rows of lists."""

from dataclasses import fields

import torch

from bench.ruler_model.lists import list_rows
from bench.ruler_model.rows import Rows, lookup_rows


def make_batch(batch: int, num_tokens: int, generator: torch.Generator, seed: int, list_share: float = 0.25) -> Rows:
    """Draw rows; ``list_share`` of them are lists, at least one unless there is only one row.

    Parameters
    ----------
    batch : int
        Number of rows.
    num_tokens : int
        Length of a row in tokens, at least 193.
    generator : torch.Generator
        Its device is the device of the result. The host never waits for it.
    seed : int
        Draws where questions about lists stand.
    list_share : float
        0 to 1.

    Returns
    -------
    Rows
        Lookups first. Lists have questions that are not there, so that all rows have the same number.
    """
    lists = max(1, round(batch * list_share)) if batch > 1 and list_share > 0 else 0
    lookups = lookup_rows(batch - lists, num_tokens, generator) if batch > lists else None
    others = list_rows(lists, num_tokens, generator, seed) if lists else None
    if lookups is None or others is None:
        found = lookups or others
        assert found is not None
        return found
    missing = lookups.positions.shape[1] - others.positions.shape[1]
    joined = {}
    for field in fields(Rows):
        first, second = getattr(lookups, field.name), getattr(others, field.name)
        if field.name != "token_ids":
            empty = second.new_zeros((lists, missing, *second.shape[2:]))
            second = torch.cat([second, empty], dim=1)
        joined[field.name] = torch.cat([first, second])
    return Rows(**joined)
