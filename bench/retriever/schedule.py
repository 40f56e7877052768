"""Row lengths by stage, and the learning rate."""

import math
from dataclasses import dataclass

WARMUP_STEPS = 200
DECAY_START = 0.4


@dataclass(frozen=True)
class Stage:
    """Row length in tokens, and its share of the training time."""

    num_tokens: int
    share: float


def parse_stages(text: str) -> list[Stage]:
    """Parse lengths in tokens (>= 97) and shares (> 0, any unit); ValueError for anything else.

    Example
    -------
    >>> parse_stages("512:1,2048:3")
    [Stage(num_tokens=512, share=0.25), Stage(num_tokens=2048, share=0.75)]
    """
    pieces = [piece.split(":") for piece in text.split(",")]
    try:
        pairs = [(int(length), float(share)) for length, share in pieces]
    except ValueError:
        raise ValueError(f"stages must be length:share pieces between commas; got {text!r}") from None
    if any(length < 97 or share <= 0 for length, share in pairs):
        raise ValueError(f"stages must have lengths of at least 97 tokens and shares above 0; got {text!r}")
    total = sum(share for _, share in pairs)
    return [Stage(length, share / total) for length, share in pairs]


def is_stage_done(spent: float, share: float, answers: float) -> bool:
    """True at 98% right answers, or at 80% once the stage has spent its share of the time."""
    return answers >= 0.98 or (spent >= share and answers >= 0.8)


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Linear warm-up over 200 steps, `peak`, then a cosine to 0 over the last 60% of the time (`progress` from 0 to 1)."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    decayed = min(max(progress - DECAY_START, 0.0) / (1 - DECAY_START), 1.0)
    return peak * warmup * 0.5 * (1 + math.cos(math.pi * decayed))
