"""The training schedule: row lengths by stage, and the learning rate."""

import math
from dataclasses import dataclass

WARMUP_STEPS = 200
DECAY_START = 0.4


@dataclass(frozen=True)
class Stage:
    """A stage of training on rows of one length, for a share of the training time.

    Attributes
    ----------
    num_tokens : int
        Length of a row in tokens.
    share : float
        Share of the total time, above 0.
    """

    num_tokens: int
    share: float


def parse_stages(text: str) -> list[Stage]:
    """Read ``"512:1,2048:1,8192:2"``: lengths in tokens with their shares of the time, in any unit.

    Raises
    ------
    ValueError
        If a piece is no ``length:share`` with a length of at least 97 tokens and a share above 0.

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
    """Return whether to move on to the next length.

    A stage ends early once it is learned, and late if it is not: longer rows teach nothing before that.

    Parameters
    ----------
    spent, share : float
        What the stage has had and was given of the whole training time, 0 to 1.
    answers : float
        Share of answers lately that were right in all four tokens, of questions asked for the first time.
    """
    return answers >= 0.98 or (spent >= share and answers >= 0.8)


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Return the rate: a linear warm-up over 200 steps, then ``peak``, then a cosine down to 0 over the last 60% of the time.

    Parameters
    ----------
    peak : float
    step : int
        Steps taken so far.
    progress : float
        Share of the training time that has passed, 0 to 1.
    """
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    decayed = min(max(progress - DECAY_START, 0.0) / (1 - DECAY_START), 1.0)
    return peak * warmup * 0.5 * (1 + math.cos(math.pi * decayed))
