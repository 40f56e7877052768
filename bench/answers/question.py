"""A question with its exact answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Question(NamedTuple):
    text: str  # what the user says
    prefix: str  # what the answer begins with, given to the model
    answer: str  # the whole right answer behind it, whose log-probability is read
    answers: list[str]  # its parts, in order
    evidence: Sequence[str] = ()  # the pieces of `text` that the answer needs, each once in it; none: the whole text
    new_tokens: int = 64  # that a model may answer


def listed(parts: Sequence[str]) -> str:
    """Parts as English lists them: ``a, b, and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"
