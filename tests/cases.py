"""Inputs with structure, and the calls that tests draw, for the selection and the reference alike."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import Self

from flexmask import METHODS, block_masks
from flexmask.base.inputs import attention_inputs
from flexmask.base.selection import BlockLists
from flexmask.block_masks import hybrid
from flexmask.method import Method, method_of
from flexmask.selection.prepare import prepare_selection
from flexmask.selection.select import select_blocks
from flexmask.stats import STATISTICS
from tests.drawn_options import attention_masks, q_offsets, score_options
from tests.oracle.hybrid import Rule
from tests.oracle.reference import reference
from tests.oracle.result import ReferenceResult


def structured_inputs(
    generator: torch.Generator, batch: int, num_heads: int, num_kv_heads: int, q_len: int, kv_len: int, head_dim: int,
    sharpness: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Query and key whose heads attend to sinks, heavy keys, offsets, topics, or evenly; float32.

    Each query head draws its own mix. With `sharpness` above 1 fewer keys hold the attention, and none attends evenly.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    part = head_dim // 4
    key = normal(batch, num_kv_heads, kv_len, head_dim) * 0.3
    # positions as rotating pairs
    angles = torch.arange(kv_len)[:, None] * (2.0 / (1.0 + torch.arange(part // 2)) ** 1.5)
    key[..., : 2 * (part // 2)] += torch.cat([angles.cos(), angles.sin()], -1)
    heavy = (torch.rand(batch, num_kv_heads, kv_len, generator=generator) < 4 / kv_len).float()
    heavy[..., 0] = 1
    key[..., part] += 3 * heavy
    topics = normal(7, part) * 1.5
    topic_of = (torch.arange(kv_len) // max(1, int(torch.randint(8, 48, (), generator=generator)))) % 7
    key[..., -part:] += topics[topic_of]

    query = normal(batch, num_heads, q_len, head_dim) * 0.3
    position = torch.arange(kv_len - q_len, kv_len)
    strength = sharpness * math.sqrt(head_dim)
    for b in range(batch):
        for h in range(num_heads):
            kind = int(torch.randint(5 if sharpness == 1 else 4, (), generator=generator))
            if kind in (0, 3):
                offset = int(torch.randint(0, max(1, kv_len // 2), (), generator=generator))
                turned = angles[(position - offset).clamp(min=0)]
                query[b, h, :, : 2 * (part // 2)] += strength * torch.cat([turned.cos(), turned.sin()], -1)
            if kind in (1, 3):
                query[b, h, :, part] += strength * 0.8
            if kind == 2:
                query[b, h, :, -part:] += math.sqrt(head_dim) * 2.5 / part * topics[topic_of[position]]
    return query, key


@dataclass(init=False)
class Config:
    """A method with its options; of those given, the options of other methods do not count."""

    method: str
    block_size: int
    given: dict[str, Any]

    def __init__(
        self, gamma: Any = 0.95, tau: float = 0.1, *, method: str = "flexprefill", block_size: int = 128, min_budget: int = 1024,
        **options: Any,
    ) -> None:  # fmt: skip
        gamma = tuple(gamma) if isinstance(gamma, list) else gamma
        self.method, self.block_size = method, block_size
        self.given = {"gamma": gamma, "tau": tau, "min_budget": min_budget, **options}

    def with_options(self, **changes: Any) -> Config:
        return Config(**{"method": self.method, "block_size": self.block_size, **self.given, **changes})

    @property
    def options(self) -> dict[str, Any]:
        return {name: self.given.get(name, default) for name, default in METHODS[self.method].defaults.items()}

    @property
    def keywords(self) -> dict[str, Any]:
        return {"block_size": self.block_size, **self.options}

    @property
    def call(self) -> dict[str, Any]:
        return {"method": self.method, **self.keywords}

    @property
    def checked_method(self) -> Method:
        return method_of(self.method, self.block_size, self.options)

    def mask(self, query: Tensor, key: Tensor, **keywords: Any) -> Any:
        return mask_function(self.method)(query, key, **{**self.keywords, **keywords})


def mask_function(method: str) -> Any:
    return getattr(block_masks, f"{method}_mask")


def hybrid_rule() -> Rule:
    """The present constants of hybrid selection."""
    floor: dict[str, Any] = {"halvings": hybrid.plain.HALVINGS, "slack": hybrid.plain.SLACK}
    return Rule(**hybrid.RULE._asdict(), **floor)


@contextlib.contextmanager
def lower_thresholds(factor: float) -> Iterator[None]:
    """Hybrid's thresholds times a factor: an even share of a short prompt is large."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hybrid, "RULE", hybrid.plain.Rule(*(factor * multiple for multiple in hybrid.RULE)))
        yield


@contextlib.contextmanager
def by_kernels() -> Iterator[None]:
    """Run kernels on any device, on a CPU in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Method, "runs_kernels", lambda self, query: self.has_kernels)
        yield


class Chosen(NamedTuple):
    """The outcome of a selection, its statistics by name."""

    lists: BlockLists
    keep: Tensor
    stats: Any


@dataclass
class Case:
    query: Tensor = field(repr=False)
    key: Tensor = field(repr=False)
    config: Config
    scores: dict[str, Any] = field(default_factory=dict)  # scale, softcap, window
    attention_mask: Tensor | None = None
    q_offset: int | Tensor | None = None
    prompt_len: int | None = None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print sizes instead of numbers when hypothesis reports a failing case."""
        printer.text(f"query {tuple(self.query.shape)}, key {tuple(self.key.shape)}, {self}")

    def to(self, device: torch.device) -> Self:
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def keywords(self) -> dict[str, Any]:
        """Keywords that mask functions and the oracle share."""
        return {
            **self.scores, "attention_mask": self.attention_mask, "q_offset": self.q_offset, "prompt_len": self.prompt_len
        }  # fmt: skip

    @property
    def gammas(self) -> Tensor:
        """Each head's gamma, (num_heads,) float64."""
        return torch.tensor(self.config.options["gamma"], dtype=torch.float64).expand(self.query.shape[1])

    def select(self, query: Tensor | None = None, key: Tensor | None = None) -> Chosen:
        query, key = self.query if query is None else query, self.key if key is None else key
        inputs = attention_inputs(query, key, **self.keywords())
        sparse = inputs.with_offset()
        prepared = prepare_selection(self.config.checked_method.for_inputs(inputs), sparse)
        found = select_blocks(prepared, sparse, with_map=True, statistics=STATISTICS)
        assert found.keep is not None
        return Chosen(found.lists, found.keep, SimpleNamespace(**found.stats))

    def reference(self) -> ReferenceResult:
        rule: dict[str, Any] = {"rule": hybrid_rule()} if self.config.method == "hybrid" else {}
        return reference(self.query, self.key, **self.config.call, **self.keywords(), **rule)


# no round shares: nearly even attention fills whole rows of the pooled map, and gamma must not fall on an edge
GAMMAS = (0.31, 0.43, 0.53, 0.61, 0.71, 0.83, 0.91, 0.947)
KV_LENS = st.sampled_from([1, 15, 16, 17, 63, 129, 200, 1000]) | st.integers(1, 300) | st.integers(150, 450)
# only among gammas by head: a case that keeps everything compares nothing
BY_HEAD_ONLY = 1.0
# values of further options, of whichever method has them
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "tau": st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.6, 1.0]), "query_aware": st.sampled_from(["flatten", "per_query"]),
    "pattern_queries": st.sampled_from(["last", "middle"]), "index_queries": st.sampled_from(["last", "middle"]),
    "min_coverage": st.sampled_from([0.0, 0.29, 0.57, 0.83]), "last_rows_dense": st.booleans(),
}  # fmt: skip


@st.composite
def cases(
    draw: st.DrawFn, /, kv_lens: st.SearchStrategy[int] = KV_LENS, block_sizes: Sequence[int] = (16, 16, 32, 48),
    gammas: Sequence[float] = (*GAMMAS, 1.0), budgets: Sequence[int] = (0, 1), **fixed: Any,
) -> Case:  # fmt: skip
    """Any call; `fixed` sets options instead of drawing them."""
    config = draw(configs(block_sizes, st.sampled_from(gammas), budgets, **fixed))
    kv_len = draw(kv_lens)
    q_len = draw(st.just(kv_len) | st.integers(1, kv_len))
    batch = 1 if kv_len == 1000 else draw(st.integers(1, 2))
    case = drawn_inputs(draw, config, batch, q_len, kv_len, sharpness=draw(st.sampled_from([1.0, 5.0])))
    case.attention_mask = draw(attention_masks(batch, kv_len))
    case.q_offset = draw(q_offsets(batch, kv_len - q_len))
    case.prompt_len = draw(st.none() | st.integers(1, 3 * kv_len))
    case.scores = draw(score_options(kv_len))
    return case


@st.composite
def sparse_cases(draw: st.DrawFn, /, max_blocks: int = 20, **fixed: Any) -> Case:
    """Calls long enough to drop blocks: at least 12 key blocks, no cap, gammas from 0.3 to 0.95."""
    config = draw(configs([16, 32], st.sampled_from(GAMMAS), **{"max_budget": None, **fixed}))
    kv_len = draw(st.integers(12 * config.block_size, max_blocks * config.block_size))
    q_len = draw(st.integers(kv_len // 2, kv_len)) if draw(st.booleans()) else kv_len
    case = drawn_inputs(draw, config, 1, q_len, kv_len, sharpness=5.0)
    if draw(st.booleans()):
        case.attention_mask = torch.arange(kv_len)[None] >= draw(st.integers(0, 3 * config.block_size))
    if draw(st.integers(0, 3)) == 0:
        case.scores = {"window": draw(st.integers(8 * config.block_size, kv_len))}
    case.prompt_len = draw(st.none() | st.integers(kv_len, 3 * kv_len))
    return case


@st.composite
def published_cases(draw: st.DrawFn, /, **fixed: Any) -> Case:
    """Calls that the published code can do."""
    config = draw(configs([16, 32], st.sampled_from(GAMMAS), (1, 2), method="published", **fixed))
    length = config.block_size * draw(st.integers(12, 24))
    case = drawn_inputs(draw, config, 1, length, length, sharpness=2.0)
    case.scores = draw(st.fixed_dictionaries({}, optional={"scale": st.sampled_from([0.05, 0.2])}))
    return case


def configs(
    block_sizes: Sequence[int], gammas: st.SearchStrategy[float], budgets: Sequence[int] = (0, 1), **fixed: Any
) -> st.SearchStrategy[Config]:
    """Options with a `min_budget` from `budgets`, in blocks, and no cap or one above it."""

    def config(block_size: int, budget: int, cap: int | None, **options: Any) -> Config:
        limits = {"min_budget": budget * block_size, "max_budget": None if cap is None else max(cap, budget + 1) * block_size - 5}
        return Config(**{**limits, **options, "block_size": block_size, **fixed})

    return st.builds(
        config, block_size=st.sampled_from(block_sizes), budget=st.sampled_from(budgets), cap=st.sampled_from([None, None, 3, 5]),
        gamma=gammas, **DRAWN,
    )  # fmt: skip


def drawn_inputs(draw: st.DrawFn, config: Config, batch: int, q_len: int, kv_len: int, sharpness: float = 1.0) -> Case:
    """A case of fresh inputs, without padding, offset or score options; a drawn gamma may become one per head."""
    num_heads, num_kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)]))
    head_dim = draw(st.sampled_from([16, 32, 64] if sharpness == 1 else [32, 64]))  # a sharp offset needs many dimensions
    # hypothesis varies options of a known case; the inputs must change too
    seed = zlib.crc32(repr((draw(st.integers(0, 2**31)), config, batch, q_len, kv_len, head_dim)).encode())
    generator = torch.Generator().manual_seed(seed)
    query, key = structured_inputs(generator, batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, sharpness)
    gamma = config.options["gamma"]
    if gamma in GAMMAS and draw(st.booleans()):
        own = st.lists(st.sampled_from([*GAMMAS, gamma, BY_HEAD_ONLY]), min_size=num_heads, max_size=num_heads)
        config = config.with_options(gamma=draw(own))
    return Case(query, key, config)
