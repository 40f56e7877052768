"""Inputs with structure, what they must give by definition, and the comparisons that the tests share."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import KNOWS_LENGTHS
from flexmask.config import FlexPrefillConfig
from flexmask.flexprefill import searched
from flexmask.reference import ReferenceResult, reference_flexprefill
from flexmask.search import SearchResult


def structured_inputs(
    generator: torch.Generator,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    sharpness: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Query and key whose heads attend to sinks, to heavy keys, along offsets, to topics, or evenly; float32.

    Every key head carries all of it, in parts of the head dimension; each query head picks its own mix. With more `sharpness`
    than 1 fewer keys hold the attention, and none attends evenly.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    part = head_dim // 4
    key = normal(batch, num_kv_heads, kv_len, head_dim) * 0.3
    # positions as rotating pairs: a query turned back by an offset meets the key at that offset
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


@dataclass
class Case:
    """One call of the search: tensors and options."""

    query: Tensor = field(repr=False)
    key: Tensor = field(repr=False)
    config: FlexPrefillConfig
    scores: dict[str, Any] = field(default_factory=dict)  # scale, softcap, window
    attention_mask: Tensor | None = None
    q_offset: int | Tensor | None = None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints of a failing case: sizes instead of numbers."""
        printer.text(f"query {tuple(self.query.shape)}, key {tuple(self.key.shape)}, {self}")

    def with_config(self, **changes: Any) -> Case:
        """The same call with other options."""
        return replace(self, config=replace(self.config, **changes))

    def to(self, device: torch.device) -> Case:
        """The same call on another device."""

        def moved(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        return replace(self, **{name: moved(getattr(self, name)) for name in ("query", "key", "attention_mask", "q_offset")})

    def keywords(self) -> dict[str, Any]:
        """Keywords of flexprefill_mask and reference_flexprefill alike, but for the config."""
        return {**self.scores, "attention_mask": self.attention_mask, "q_offset": self.q_offset}

    def reference_keywords(self) -> dict[str, Any]:
        """Keywords of reference_flexprefill."""
        config = {name: getattr(self.config, name) for name in self.config.__dataclass_fields__}
        return {**config, **self.keywords()}

    def search(self, query: Tensor | None = None, key: Tensor | None = None) -> SearchResult:
        """What the fast path chooses, with statistics."""
        query, key = self.query if query is None else query, self.key if key is None else key
        offset = self.q_offset
        if isinstance(offset, int):
            offset = torch.full((query.shape[0],), offset, device=query.device)
        scores = {"scale": None, "softcap": None, "window": None, **self.scores}
        return searched(query, key, self.config, attention_mask=self.attention_mask, offset=offset, with_stats=True, **scores)

    def reference(self) -> ReferenceResult:
        """What the reference decides."""
        return reference_flexprefill(self.query, self.key, **self.reference_keywords())


# Cases drawn by hypothesis

# Attention that is all but even fills whole rows of the pooled map: a whole number of rows must not be what is asked for.
GAMMAS = (0.31, 0.43, 0.53, 0.61, 0.71, 0.83, 0.91, 0.947)
PADDINGS = ("none", "left", "right", "holes", "all")


@st.composite
def cases(draw: st.DrawFn, /, **fixed: Any) -> Case:
    """Any call: lengths down to 1, chunks, groups of heads, paddings, offsets, score options and every option of the config.

    `fixed` sets options of the config instead of drawing them.
    """
    config = draw(configs([16, 16, 32, 48], st.sampled_from([*GAMMAS, 1.0]), **fixed))
    kv_len = draw(st.sampled_from([1, 15, 16, 17, 63, 129, 200, 1000]) | st.integers(1, 300) | st.integers(150, 450))
    q_len = draw(st.just(kv_len) | st.integers(1, kv_len))
    batch = 1 if kv_len == 1000 else draw(st.integers(1, 2))
    case = drawn_inputs(draw, config, batch, q_len, kv_len, sharpness=draw(st.sampled_from([1.0, 5.0])))
    case.attention_mask = draw(attention_masks(batch, kv_len))
    case.q_offset = draw(q_offsets(batch, kv_len - q_len))
    case.scores = draw(score_options(kv_len))
    return case


@st.composite
def sparse_cases(
    draw: st.DrawFn, /, padded: bool = True, windowed: bool = True, chunked: bool = True, most_blocks: int = 20, **fixed: Any
) -> Case:
    """Calls long enough to drop blocks: at least 12 key blocks, no cap, gammas from .3 to .95."""
    config = draw(configs([16, 32], st.sampled_from(GAMMAS), **{"max_budget": None, **fixed}))
    kv_len = draw(st.integers(12 * config.block_size, most_blocks * config.block_size))
    q_len = draw(st.integers(kv_len // 2, kv_len)) if chunked and draw(st.booleans()) else kv_len
    case = drawn_inputs(draw, config, 1, q_len, kv_len, sharpness=5.0)
    if padded and draw(st.booleans()):
        case.attention_mask = torch.arange(kv_len)[None] >= draw(st.integers(0, 3 * config.block_size))
    if windowed and draw(st.integers(0, 3)) == 0:
        case.scores = {"window": draw(st.integers(8 * config.block_size, kv_len))}
    return case


@st.composite
def published_cases(draw: st.DrawFn, /, **fixed: Any) -> Case:
    """Calls that the published code can do: whole prompts of a multiple of the block, no more options than it has."""
    published = {"selection": "reference", "query_aware": "flatten", "pattern_queries": "last", "index_queries": "last"}
    config = draw(configs([16, 32], st.sampled_from(GAMMAS), (1, 2), **published, **fixed))
    length = config.block_size * draw(st.integers(12, 24))
    case = drawn_inputs(draw, config, 1, length, length, sharpness=2.0)
    case.scores = draw(st.fixed_dictionaries({}, optional={"scale": st.sampled_from([0.05, 0.2])}))
    return case


def configs(
    block_sizes: list[int], gammas: st.SearchStrategy[float], floors: tuple[int, int] = (0, 1), **fixed: Any
) -> st.SearchStrategy[FlexPrefillConfig]:
    """Options with a floor from `floors`, in blocks, and with no cap or one above it: three or five blocks, less a few tokens."""

    def config(block_size: int, floor: int, cap: int | None, **options: Any) -> FlexPrefillConfig:
        budgets = {"min_budget": floor * block_size, "max_budget": None if cap is None else max(cap, floor + 1) * block_size - 5}
        return FlexPrefillConfig(**{**budgets, **options, "block_size": block_size, **fixed})

    return st.builds(
        config,
        block_size=st.sampled_from(block_sizes),
        floor=st.sampled_from(floors),
        cap=st.sampled_from([None, None, 3, 5]),
        gamma=gammas,
        tau=st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.6, 1.0]),
        query_aware=st.sampled_from(["flatten", "per_query"]),
        pattern_queries=st.sampled_from(["last", "middle"]),
        index_queries=st.sampled_from(["last", "middle"]),
    )


def drawn_inputs(draw: st.DrawFn, config: FlexPrefillConfig, batch: int, q_len: int, kv_len: int, sharpness: float = 1.0) -> Case:
    """A case of fresh inputs and heads, without padding, offset or score options."""
    num_heads, num_kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)]))
    head_dim = draw(st.sampled_from([16, 32, 64] if sharpness == 1 else [32, 64]))  # a sharp offset needs many dimensions
    # other options, other inputs: what hypothesis varies of a case that it tried is a fresh case
    seed = zlib.crc32(repr((draw(st.integers(0, 2**31)), config, batch, q_len, kv_len, head_dim)).encode())
    generator = torch.Generator().manual_seed(seed)
    query, key = structured_inputs(generator, batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, sharpness)
    return Case(query, key, config)


@st.composite
def attention_masks(draw: st.DrawFn, batch: int, kv_len: int) -> Tensor | None:
    """Paddings of either side, with holes, or of a whole batch row; bool or integer; half the time none."""
    if draw(st.booleans()):
        return None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = []
    for _ in range(batch):
        slot, length = torch.arange(kv_len), draw(st.integers(0, kv_len))
        kept = draw(st.sampled_from([0.1, 0.5, 0.9]))
        row = {
            "none": slot >= 0,
            "left": slot >= length,
            "right": slot < length,
            "holes": torch.rand(kv_len, generator=generator) < kept,
            "all": slot < 0,
        }[draw(st.sampled_from(PADDINGS))]
        rows.append(row)
    return torch.stack(rows).to(draw(st.sampled_from([torch.bool, torch.int64, torch.uint8])))


def q_offsets(batch: int, largest: int) -> st.SearchStrategy[int | Tensor | None]:
    """The default (half the time), an int, a 0-d tensor or one per batch row; tensors may leave the range, to be clamped."""
    ints = st.integers(0, largest)
    loose = st.integers(-3, largest + 3)
    tensors = loose.map(torch.tensor) | st.lists(loose, min_size=batch, max_size=batch).map(torch.tensor)
    offsets: st.SearchStrategy[int | Tensor | None] = st.none() | st.none() | ints | tensors
    return offsets


def score_options(kv_len: int) -> st.SearchStrategy[dict[str, Any]]:
    """Scale, softcap and window, each now and then."""
    return st.fixed_dictionaries(
        {},
        optional={
            "scale": st.sampled_from([0.05, 0.2]),
            "softcap": st.sampled_from([2.0, 20.0]),
            "window": st.integers(2, kv_len + 5),  # with a window of 1 every block is a tie
        },
    )


# What a call must give, pair by pair


def visible_pairs(case: Case) -> Tensor:
    """Which keys each row of a case sees: (batch, q_len, kv_len) bool."""
    (batch, _, q_len, _), kv_len = case.query.shape, case.key.shape[2]
    offset = kv_len - q_len if case.q_offset is None else case.q_offset
    offsets = torch.as_tensor(offset).cpu().clamp(0, kv_len - q_len).expand(batch)
    is_token = torch.ones(batch, kv_len).bool() if case.attention_mask is None else case.attention_mask.cpu() != 0
    return seen_pairs(q_len, offsets, is_token, case.scores.get("window"))


def seen_pairs(q_len: int, offsets: Tensor, is_token: Tensor, window: int | None) -> Tensor:
    """Which keys each row sees, by definition, from (batch,) offsets and (batch, kv_len) tokens: (batch, q_len, kv_len) bool."""
    position = offsets[:, None] + torch.arange(q_len)
    distance = position[:, :, None] - torch.arange(is_token.shape[1])
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return near & is_token.gather(1, position)[:, :, None] & is_token[:, None]


def by_block(pairs: Tensor, block_size: int, every: bool = False) -> Tensor:
    """Whether some pair (or every existing one) is True in each block: (..., num_q_blocks, num_kv_blocks) bool."""
    short = [-length % block_size for length in pairs.shape[-2:]]
    padded = torch.nn.functional.pad(pairs, (0, short[1], 0, short[0]), value=every)
    blocks = padded.unflatten(-1, (-1, block_size)).unflatten(-3, (-1, block_size)).transpose(-3, -2)
    return blocks.all(-1).all(-1) if every else blocks.any(-1).any(-1)


def expanded(keep: Tensor, case: Case) -> Tensor:
    """Pairs that attention under a block map sees: (batch, num_heads, q_len, kv_len) bool."""
    size = case.config.block_size
    pairs = keep.cpu().repeat_interleave(size, -2).repeat_interleave(size, -1)
    return pairs[..., : case.query.shape[2], : case.key.shape[2]] & visible_pairs(case)[:, None]


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    product_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Dense attention under a mask of pairs, and its log-sum-exp, in float64; rows that see nothing give 0 and -inf.

    The products of queries and keys may be rounded to another `product_dtype`.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    value = value.double()
    products = query.to(product_dtype) @ key.to(product_dtype).transpose(-1, -2)
    scores = products.double() * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.masked_fill(~mask.any(-1, keepdim=True), 0.0).softmax(-1).masked_fill(~mask, 0.0)
    return weights @ value, scores.logsumexp(-1)


# Comparisons


def kept_by_lists(result: SearchResult) -> tuple[Tensor, Tensor]:
    """Partial and full blocks as bool maps, read from the index lists."""
    lists = result.lists
    return dense_map(lists.kv_num_blocks, lists.kv_indices), dense_map(lists.full_kv_num_blocks, lists.full_kv_indices)


def dense_map(counts: Tensor, indices: Tensor) -> Tensor:
    """A bool map from counts and indices, entry by entry of the first `count` of every row."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    hits = torch.zeros_like(indices).scatter_add(-1, indices.long(), listed.to(indices.dtype))
    assert hits.max() <= 1, "a block is listed twice"
    return hits.bool()


@dataclass
class Tally:
    """Decisions compared, and those whose margin is too small to demand equality."""

    decisions: int = 0
    close: int = 0
    known: set[float] = field(default_factory=set)

    def add(self, close: Tensor) -> None:
        self.decisions += close.numel()
        self.close += int(close.sum())

    def add_decisions(self, expected: ReferenceResult, margin: float = 1e-5) -> None:
        """Count every decision of a call: pattern, key blocks and diagonals of each head, the map of a query-aware one.

        One met before, with the very same margin, does not count again: hypothesis likes to vary what it tried already.
        """
        families = [expected.pattern_margin, expected.vertical_margin, expected.slash_margin]
        families.append(expected.query_aware_margin[expected.is_query_aware])
        new = {value for family in families for value in family.flatten().tolist() if value < math.inf} - self.known
        self.known |= new
        self.add(torch.tensor([value <= margin for value in new]))

    def check(self) -> None:
        """More than 1% of close decisions would make the comparison worthless; few draws may have more by chance."""
        assert self.decisions > 0
        allowed = 0.01 * self.decisions
        # three standard deviations
        assert self.close <= allowed + 3 * math.sqrt(allowed), f"{self.close} of {self.decisions} decisions were close"


@dataclass
class Drawn:
    """What drawn cases turned out to be: worthless for a comparison if everything is kept or all heads are alike.

    Heads met before do not count again: hypothesis likes to vary what it tried already.
    """

    heads: int = 0
    sparse: int = 0
    query_aware: int = 0
    known: set[tuple[float, float]] = field(default_factory=set)

    def add(self, expected: ReferenceResult) -> None:
        heads = zip(expected.density.flatten(), expected.js_distance.flatten(), expected.is_query_aware.flatten(), strict=True)
        for density, distance, query_aware in heads:
            head = (float(density), float(distance))
            if density == 0 or head in self.known:
                continue
            self.known.add(head)
            self.heads += 1
            self.sparse += int(density < 0.9)
            self.query_aware += int(query_aware)

    def check(self) -> None:
        """At least 80% of heads drop a tenth of their blocks, and both kinds of head occur."""
        assert self.sparse >= 0.8 * self.heads, f"{self.sparse} of {self.heads} heads have a density under .9"
        assert 3 <= self.query_aware <= self.heads - 3, f"{self.query_aware} of {self.heads} heads are query-aware"


def assert_same_blocks(result: SearchResult, expected: ReferenceResult, margin: float = 1e-5) -> Tensor:
    """Heads whose decisions all have a margin must have the same lists; returns which heads were too close to call."""
    close = expected.margin <= margin
    partial, full = kept_by_lists(result)
    clear = ~close[..., None, None]
    wrong_full = ((full.cpu() != expected.full) & clear).sum()
    wrong_partial = ((partial.cpu() != (expected.keep & ~expected.full)) & clear).sum()
    assert wrong_full == 0 and wrong_partial == 0, f"{wrong_full} full and {wrong_partial} partial blocks differ"
    assert result.stats is not None
    assert torch.equal(result.stats.is_query_aware.cpu()[~close], expected.is_query_aware[~close])
    return close


def assert_same_statistics(
    result: SearchResult, expected: ReferenceResult, margin: float = 1e-5, underflow: bool = False
) -> None:
    """The other statistics of heads with a margin; a distance is compared squared, before the root blows up rounding.

    With `underflow` a distance may be NaN, and where exactly a share becomes 0 is left open, but for what follows from it.
    """
    assert result.stats is not None
    clear = expected.margin > margin
    for name in ("num_vertical_blocks", "num_slash_blocks"):
        got, wanted = getattr(result.stats, name).cpu(), getattr(expected, name)
        assert got.dtype == torch.int64
        assert torch.equal(got[clear], wanted[clear]), f"{name}: {got} instead of {wanted}"
    for name in ("density", "coverage"):
        got, wanted = getattr(result.stats, name).cpu(), getattr(expected, name)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double()[clear], wanted[clear], atol=1e-5, rtol=1e-5)
    squares = result.stats.js_distance.cpu().double() ** 2, expected.js_distance**2
    defined = ~(squares[0].isnan() | squares[1].isnan())
    assert underflow or defined.all()
    torch.testing.assert_close(squares[0][defined], squares[1][defined], atol=2e-6, rtol=1e-4)


def assert_well_formed(result: SearchResult) -> None:
    """Index lists as FlexAttention wants them, and as `keep` says: contiguous int32, ascending, 0 past the count, disjoint."""
    assert result.keep is not None
    shape = result.keep.shape
    for counts, indices in (result.lists[:2], result.lists[2:]):
        assert counts.dtype == indices.dtype == torch.int32
        assert counts.is_contiguous() and indices.is_contiguous()
        assert (counts.shape, indices.shape) == (shape[:-1], shape)
        assert counts.min() >= 0 and counts.max() <= shape[-1]
        place = torch.arange(shape[-1], device=indices.device)
        listed = place < counts.unsqueeze(-1)
        assert (indices[~listed] == 0).all(), "entries past the count"
        assert indices.min() >= 0 and indices.max() < shape[-1], "an index is out of range"
        rises = indices[..., 1:] > indices[..., :-1]
        assert (rises | ~listed[..., 1:]).all(), "indices do not ascend"
    partial, full = kept_by_lists(result)
    assert not (partial & full).any(), "a block is in both lists"
    assert torch.equal(partial | full, result.keep)


def known_lengths(q_len: int, kv_len: int, block_size: int) -> tuple[int, int]:
    """The lengths that a BlockMask has in its shape and counts in sparsity(): torch 2.5 knows whole blocks only."""
    if KNOWS_LENGTHS:
        return q_len, kv_len
    return q_len + -q_len % block_size, kv_len + -kv_len % block_size


def assert_honest(block_mask: BlockMask, lengths: Sequence[int]) -> None:
    """A BlockMask of a query and a key of `lengths`: its lists, to_dense(), sparsity() and mask_mod agree, pair by pair."""
    size = block_mask.BLOCK_SIZE[0]
    q_len, kv_len = lengths
    batch, num_heads, *known = block_mask.shape
    assert tuple(known) == known_lengths(q_len, kv_len, size)
    device = block_mask.kv_indices.device
    index = (torch.arange(n, device=device) for n in (batch, num_heads, q_len, kv_len))
    b, h, q, k = (x.view([-1 if i == place else 1 for i in range(4)]) for place, x in enumerate(index))
    pairs = block_mask.mask_mod(b, h, q, k).expand(batch, num_heads, q_len, kv_len)
    assert block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None
    partial = dense_map(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = dense_map(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    assert torch.equal(full, by_block(pairs, size, every=True)), "full blocks are not those without a hidden pair"
    assert torch.equal(partial, by_block(pairs, size) & ~full), "partial blocks are not those with pairs of both kinds"
    assert torch.equal(block_mask.to_dense().bool(), partial | full)
    kept = int((partial | full).sum())
    counted = batch * num_heads * math.prod(known)
    assert math.isclose(block_mask.sparsity(), 100 * (1 - kept * size**2 / counted), abs_tol=1e-3)


TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}


def assert_same_attention(out: Tensor, expected: Tensor) -> None:
    """An attention output against float64: within 2e-5 for float32, 1e-2 for halves; rows that see nothing are exactly 0."""
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), atol=tolerance, rtol=tolerance)
    assert not out.cpu()[expected.cpu().abs().sum(-1) == 0].any()
