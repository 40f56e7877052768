"""The options that define FlexPrefill's selection, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

SELECTIONS = ("coverage", "reference")
QUERY_AWARE_RULES = ("flatten", "per_query")
QUERY_SUBSETS = ("last", "middle")
SHARED_MASKS = (None, "union", "mean")


@dataclass(frozen=True)
class FlexPrefillConfig:
    """The options of FlexPrefill that travel together; every range is checked on creation.

    Based on FlexPrefill (https://arxiv.org/abs/2502.20766), section 3 and its appendix.

    Parameters
    ----------
    gamma
        Share of the estimated attention that the kept blocks must hold. Range (0, 1]; 1 keeps every visible block.
        Default 0.95 (the paper's value for Llama-3.1 and GLM-4).
    tau
        Jensen-Shannon distance under which a head is query-aware. Range [0, 1]; 0 makes no head query-aware.
        Default 0.1 (the paper's value).
    block_size
        Tokens in a block, of queries and of keys alike. A multiple of 16 from 16 to 256, default 128 (the paper's value).
        Values that 64 does not divide run slowly on GPUs: kernels need tiles that divide the block.
    min_budget
        Tokens: at least this many tokens' worth of key blocks and of block diagonals are kept in every head.
        Range >= 0, default 1024 (the paper's value); 0 means no floor.
    max_budget
        Tokens: at most this many tokens' worth of key blocks and of block diagonals (and, in each row of a query-aware
        head, of its own blocks) are kept, before the floor and the blocks kept always. Range >= max(1, min_budget), or
        None (default, as the paper) for no cap. With a cap, gamma is no guarantee.
    selection
        ``"coverage"`` (default) keeps the fewest blocks whose estimated attention reaches gamma. ``"reference"``
        reproduces the block sets of the authors' published code.
    query_aware
        ``"flatten"`` (default, as the paper) selects over a query-aware head's whole pooled map, ``"per_query"`` inside
        each row of blocks (the paper's appendix on alternative index construction).
    pattern_queries, index_queries
        Which query rows decide a head's pattern, and which rows the vertical-slash index is read from:
        ``"last"`` (default, as the paper) or ``"middle"`` (the paper's appendix on the representative query subset).
    share_kv_heads
        Whether the query heads that share a key head get one mask. None (default, as the paper): a mask each. ``"union"``: the
        heads of a group keep every block that one of them keeps, so that gamma holds for each; `max_budget` bounds what each
        chooses, not the union. ``"mean"``: the mean of their attention maps decides, of the pooled estimate as of the
        representative attention, so that gamma is of the mean and one head may get less. NaN in one head spoils its group.

        Differs from the paper, where every head has a mask of its own: the heads of a group may then load the same blocks. Shared
        masks are denser: the union's by about a quarter on a trained model (bench/README.md, "Shared masks").

    Raises
    ------
    TypeError
        If a number is not a number.
    ValueError
        If a value is out of its range or not one of the words above.

    Examples
    --------
    >>> FlexPrefillConfig(gamma=0.9).min_budget
    1024
    """

    gamma: float = 0.95
    tau: float = 0.1
    block_size: int = 128
    min_budget: int = 1024
    max_budget: int | None = None
    selection: str = "coverage"
    query_aware: str = "flatten"
    pattern_queries: str = "last"
    index_queries: str = "last"
    share_kv_heads: str | None = None

    def __post_init__(self) -> None:
        check_real("gamma", self.gamma)
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1]; got {self.gamma}")
        check_real("tau", self.tau)
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau must be in [0, 1]; got {self.tau}")
        check_int("block_size", self.block_size)
        if self.block_size % 16 != 0 or not 16 <= self.block_size <= 256:
            raise ValueError(f"block_size must be a multiple of 16 from 16 to 256; got {self.block_size}")
        check_int("min_budget", self.min_budget)
        if self.min_budget < 0:
            raise ValueError(f"min_budget must be >= 0 tokens; got {self.min_budget}")
        if self.max_budget is not None:
            check_int("max_budget", self.max_budget)
            if self.max_budget < max(1, self.min_budget):
                raise ValueError(
                    f"max_budget must be at least 1 token and at least min_budget ({self.min_budget}); got {self.max_budget}"
                )
        check_word("selection", self.selection, SELECTIONS)
        check_word("query_aware", self.query_aware, QUERY_AWARE_RULES)
        check_word("pattern_queries", self.pattern_queries, QUERY_SUBSETS)
        check_word("index_queries", self.index_queries, QUERY_SUBSETS)
        check_word("share_kv_heads", self.share_kv_heads, SHARED_MASKS)

    @property
    def min_blocks(self) -> int:
        """The floor, in blocks."""
        return -(-self.min_budget // self.block_size)

    @property
    def max_blocks(self) -> int | None:
        """The cap, in blocks, or None."""
        return None if self.max_budget is None else -(-self.max_budget // self.block_size)


# read once: torch.compile cannot trace dataclasses.fields
_DEFAULTS = {field.name: field.default for field in fields(FlexPrefillConfig)}


def config_from(config: FlexPrefillConfig | None, **keywords: Any) -> FlexPrefillConfig:
    """Return `config`, or one made of `keywords`; both together are refused.

    Raises
    ------
    TypeError
        If `config` is not a FlexPrefillConfig.
    ValueError
        If `config` is given and a keyword differs from its default.
    """
    if config is None:
        return FlexPrefillConfig(**keywords)
    if not isinstance(config, FlexPrefillConfig):
        raise TypeError(f"config must be a FlexPrefillConfig; got {type(config).__name__}")
    changed = [name for name, value in keywords.items() if value != _DEFAULTS[name]]
    if changed:
        raise ValueError(f"config excludes the keywords that it holds; got config and {', '.join(changed)}")
    return config


def check_int(name: str, value: object) -> None:
    """Raise TypeError unless `value` is an int (bool is not)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")


def check_real(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless `value` is a finite int or float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be finite; got {value}")


def check_word(name: str, value: object, words: tuple[str | None, ...]) -> None:
    """Raise ValueError unless `value` is one of `words`."""
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}; got {value!r}")
