"""The options that define FlexPrefill's selection, checked once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import Tensor

from flexmask.base.checks import check_int, check_int64, check_real, check_word

_Function = TypeVar("_Function", bound=Callable[..., Any])

SELECTIONS = ("coverage", "hybrid", "reference")
QUERY_AWARE_RULES = ("flatten", "per_query")
QUERY_SUBSETS = ("last", "middle")


@dataclass(frozen=True)
class FlexPrefillConfig:
    """The options of FlexPrefill that travel together; every range is checked on creation.

    Based on FlexPrefill (https://arxiv.org/abs/2502.20766), section 3 and its appendix.

    Parameters
    ----------
    gamma
        Share of the estimated attention that the kept blocks must hold. Range (0, 1]; 1 keeps every visible block.
        Default 0.95 (the paper's value for Llama-3.1 and GLM-4). A sequence of num_heads numbers, kept as a tuple, gives every
        head its own.
    tau
        Jensen-Shannon distance under which a head is query-aware. Range [0, 1]; 0 makes no head query-aware.
        Default 0.1 (the paper's value).
    block_size
        Tokens in a block, of queries and of keys alike. A multiple of 16 from 16 to 256, default 128 (the paper's value).
        Values that 64 does not divide run slowly on GPUs: kernels need tiles that divide the block.
    min_budget
        Tokens: at least this many tokens' worth of key blocks and of block diagonals are kept in every head; of both together
        with ``selection="hybrid"``, half of it key blocks, half the nearest diagonals. There the query blocks of the last
        `block_size` rows (`index_queries`) keep twice as much: their nearest ``2 * min_budget`` tokens' worth of blocks.
        Range >= 0, default 1024 (the paper's value); 0 means no floor.
    max_budget
        Tokens: at most this many tokens' worth of key blocks and of block diagonals (and, in each row of a query-aware
        head, of its own blocks) are kept, before the floor and the blocks kept always. Range >= max(1, min_budget), or
        None (default, as the paper) for no cap. With a cap, gamma is no guarantee.
    selection
        ``"coverage"`` (default) is the paper's algorithm: the fewest blocks whose estimated attention reaches gamma.
        ``"hybrid"`` joins the lines of the last query block with the blocks that each query block's own rows attend to, and
        gives the last query block more of its nearest blocks; it has no kinds of head, so that tau, query_aware and
        pattern_queries have no part in it. ``"reference"`` reproduces the block sets of the authors' published code.
    query_aware
        ``"flatten"`` (default, as the paper) selects over a query-aware head's whole pooled map, ``"per_query"`` inside
        each row of blocks (the paper's appendix on alternative index construction).
    pattern_queries, index_queries
        Which query rows decide a head's pattern, and which rows the vertical-slash index is read from:
        ``"last"`` (default, as the paper) or ``"middle"`` (the paper's appendix on the representative query subset).
    row_stride
        Only ``selection="hybrid"``: of each query block every row_stride-th row is asked. A divisor of block_size, and at least
        a 32nd of it; default 8.

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

    gamma: float | Sequence[float] = 0.95
    tau: float = 0.1
    block_size: int = 128
    min_budget: int = 1024
    max_budget: int | None = None
    selection: str = "coverage"
    query_aware: str = "flatten"
    pattern_queries: str = "last"
    index_queries: str = "last"
    row_stride: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.gamma, (list, tuple)):
            object.__setattr__(self, "gamma", tuple(self.gamma))
        _check_gamma(self.gamma)
        check_real("tau", self.tau)
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau must be in [0, 1]; got {self.tau}")
        check_int("block_size", self.block_size)
        if self.block_size % 16 != 0 or not 16 <= self.block_size <= 256:
            raise ValueError(f"block_size must be a multiple of 16 from 16 to 256; got {self.block_size}")
        check_int("min_budget", self.min_budget)
        check_int64("min_budget", self.min_budget, "tokens")
        if self.min_budget < 0:
            raise ValueError(f"min_budget must be >= 0 tokens; got {self.min_budget}")
        if self.max_budget is not None:
            check_int("max_budget", self.max_budget)
            check_int64("max_budget", self.max_budget, "tokens")
            if self.max_budget < max(1, self.min_budget):
                raise ValueError(
                    f"max_budget must be at least 1 token and at least min_budget ({self.min_budget}); got {self.max_budget}"
                )
        check_word("selection", self.selection, SELECTIONS)
        check_word("query_aware", self.query_aware, QUERY_AWARE_RULES)
        check_word("pattern_queries", self.pattern_queries, QUERY_SUBSETS)
        check_word("index_queries", self.index_queries, QUERY_SUBSETS)
        check_int("row_stride", self.row_stride)
        if not self.block_size // 32 <= self.row_stride or self.row_stride < 1 or self.block_size % self.row_stride != 0:
            raise ValueError(
                f"row_stride must be a divisor of block_size ({self.block_size}) and at least a 32nd of it; got {self.row_stride}"
            )
        if self.selection == "hybrid" and self.max_budget is not None:
            raise ValueError(f'selection="hybrid" keeps by thresholds and takes no max_budget; got {self.max_budget}')

    @property
    def min_blocks(self) -> int:
        """The floor, in blocks."""
        return -(-self.min_budget // self.block_size)

    @property
    def half_of_min_blocks(self) -> int:
        """Half of the floor in blocks, rounded up: what hybrid selection keeps of key blocks, and of block diagonals."""
        return -(-self.min_blocks // 2)

    @property
    def max_blocks(self) -> int | None:
        """The cap, in blocks, or None."""
        return None if self.max_budget is None else -(-self.max_budget // self.block_size)


# read once: torch.compile cannot trace dataclasses.fields
OPTIONS = tuple(field.name for field in fields(FlexPrefillConfig))
_FIXED = tuple(name for name in OPTIONS if name not in ("gamma", "tau"))
# those that a search is compiled for: it takes gamma as a tensor, whatever its values are
COMPILE_TIME = ("tau", *_FIXED)


class _Unset:
    """Type of `UNSET`: by its type, since torch 2.8 cannot trace whether a symbolic number is that object."""

    def __repr__(self) -> str:
        return "UNSET"


# stands in for a keyword that was not given
UNSET: Any = _Unset()


def _check_gamma(gamma: Any) -> None:
    """Raise unless `gamma` is a number in (0, 1] or a tuple of such numbers, at least one."""
    if isinstance(gamma, Tensor):
        raise TypeError(
            "gamma must be a number or a sequence of one number a head in a config; got a tensor, which flexprefill_mask and "
            "flexprefill_attention take as a keyword"
        )
    if isinstance(gamma, tuple) and not gamma:
        raise ValueError("gamma must be a number or hold one number a head; got an empty sequence")
    for head, value in enumerate(gamma) if isinstance(gamma, tuple) else ((None, gamma),):
        name = "gamma" if head is None else f"gamma[{head}]"
        check_real(name, value)
        if not 0 < value <= 1:
            raise ValueError(f"{name} must be in (0, 1]; got {value}")


def config_from(
    config: FlexPrefillConfig | None, gamma: float | Sequence[float] | Tensor, tau: float, options: dict[str, Any]
) -> FlexPrefillConfig:
    """Return `config`, or one made of `gamma`, `tau` and `options`; both together are refused.

    A gamma that is a tensor leaves the config's at its default: it travels with the inputs.

    Raises
    ------
    TypeError
        If `config` is not a FlexPrefillConfig, or for a keyword that it has no field for.
    ValueError
        If `config` is given with keywords of its own.
    """
    if not isinstance(gamma, _Unset):
        options = {**options, "gamma": gamma}
    if not isinstance(tau, _Unset):
        options = {**options, "tau": tau}
    if config is None:
        if isinstance(gamma, Tensor):
            del options["gamma"]
        return FlexPrefillConfig(**options)
    if not isinstance(config, FlexPrefillConfig):
        raise TypeError(f"config must be a FlexPrefillConfig; got {type(config).__name__}")
    if options:
        raise ValueError(f"config excludes the keywords that it holds; got config and {', '.join(options)}")
    return config


def compile_time(config: FlexPrefillConfig) -> FlexPrefillConfig:
    """The compile-time part of `config`: gamma and tau are tensors then; gamma does not count, and tau only as being 0 or not."""
    fixed = {name: getattr(config, name) for name in _FIXED}
    return FlexPrefillConfig(tau=0.0 if config.tau == 0 else 0.5, **fixed)


def takes_options(function: _Function) -> _Function:
    """Show the fields of FlexPrefillConfig in the signature of a function that takes them as ``**options``."""
    shown = inspect.signature(FlexPrefillConfig).parameters
    own = inspect.signature(function).parameters.values()
    before = [
        p.replace(default=shown[p.name].default) if p.name in shown else p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    options = [p.replace(kind=p.KEYWORD_ONLY) for name, p in shown.items() if name in _FIXED]
    after = [p for p in own if p.kind is p.KEYWORD_ONLY]
    signature = inspect.signature(function).replace(parameters=[*before, *options, *after])
    function.__signature__ = signature  # type: ignore[attr-defined]  # which inspect and help() read
    return function
