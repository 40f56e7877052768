"""The retriever's prompts as a dataset of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets

from bench.retriever.task import make_prompt, text_of

# no training step drew these
FIRST_SEED = 50_000


def dataset(
    max_seq_lengths: Sequence[int] = (4096,), num_needles: int = 64, num_samples: int = 100, **others: Any
) -> dict[str, datasets.Dataset]:
    """`num_samples` prompts with answers per length.

    Parameters
    ----------
    max_seq_lengths
        Tokens of a prompt and its answer, by ``--metadata``. Prompts are up to 63 tokens shorter, so lengths in a batch differ.
    num_needles
        Needles in a prompt; one is asked for.
    others
        The rest of the harness's metadata.
    """
    rows = []
    for length in max_seq_lengths:
        for index in range(num_samples):
            prompt = make_prompt(length - 4 - 29 * index % 64, num_needles, 1, FIRST_SEED + index)
            rows.append({"prompt": prompt.text(), "answer": text_of(prompt.answers[0]), "max_length": length})
    return {"test": datasets.Dataset.from_list(rows, split=datasets.Split.TEST)}
