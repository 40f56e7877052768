"""Comparisons that the tests share, and counts of what was compared."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import KNOWS_LENGTHS, RELEASE
from tests.cases import Case, Chosen
from tests.expected import by_block
from tests.oracle.result import ReferenceResult


def assert_same_stats(found: object, expected: object) -> None:
    """Every statistic is the same to the bit, on the same device."""
    torch.testing.assert_close(vars(found), vars(expected), rtol=0, atol=0, equal_nan=True)


def assert_equal_lists(found: Chosen, expected: Chosen) -> None:
    assert all(map(torch.equal, found.lists, expected.lists))


def kept_by_lists(result: Chosen) -> tuple[Tensor, Tensor]:
    """Partial and full blocks as bool maps, from the index lists."""
    lists = result.lists
    return dense_map(lists.kv_num_blocks, lists.kv_indices), dense_map(lists.full_kv_num_blocks, lists.full_kv_indices)


def dense_map(counts: Tensor, indices: Tensor) -> Tensor:
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    hits = torch.zeros_like(indices).scatter_add(-1, indices.long(), listed.to(indices.dtype))
    assert hits.max() <= 1, "a block is listed twice"
    return hits.bool()


@dataclass
class Drawn:
    """Heads that were compared; repeated ones count once, since hypothesis repeats itself."""

    heads: int = 0
    close: int = 0  # with a decision too close to demand equality
    sparse: int = 0
    query_aware: int = 0
    known: set[tuple[float, float]] = field(default_factory=set)

    def add(self, expected: ReferenceResult, margin: float = 1e-5) -> None:
        for density, least, query_aware in zip(
            *(x.flatten().tolist() for x in (expected.density, expected.margin, expected.is_query_aware)), strict=True
        ):
            if density == 0 or (density, least) in self.known:
                continue
            self.known.add((density, least))
            self.heads += 1
            self.close += least <= margin
            self.sparse += density < 0.9
            self.query_aware += query_aware

    def check_close(self) -> None:
        """At most 4% of heads may be close, plus three standard deviations."""
        assert self.heads > 0
        allowed = 0.04 * self.heads
        assert self.close <= allowed + 3 * math.sqrt(allowed), f"{self.close} of {self.heads} heads were close"

    def check_kinds(self) -> None:
        """At least 60% of heads drop a tenth of their blocks, and both kinds of head occur."""
        assert self.sparse >= 0.6 * self.heads, f"{self.sparse} of {self.heads} heads have a density under .9"
        assert 3 <= self.query_aware <= self.heads - 3, f"{self.query_aware} of {self.heads} heads are query-aware"


def assert_same_blocks(result: Chosen, expected: ReferenceResult, margin: float = 1e-5) -> Tensor:
    """Heads with a margin must have the same lists; returns which heads were too close."""
    close = expected.margin <= margin
    partial, full = kept_by_lists(result)
    clear = ~close[..., None, None]
    wrong_full = ((full.cpu() != expected.full) & clear).sum()
    wrong_partial = ((partial.cpu() != (expected.keep & ~expected.full)) & clear).sum()
    assert wrong_full == 0 and wrong_partial == 0, f"{wrong_full} full and {wrong_partial} partial blocks differ"
    assert result.stats is not None
    assert torch.equal(result.stats.is_query_aware.cpu()[~close], expected.is_query_aware[~close])
    return close


def assert_same_statistics(result: Chosen, expected: ReferenceResult, margin: float = 1e-5, underflow: bool = False) -> None:
    """Statistics of heads with a margin; distances are compared squared.

    With `underflow` a distance may be NaN on either side.
    """
    assert result.stats is not None
    clear = expected.margin > margin
    for name in ("num_vertical_blocks", "num_slash_blocks"):
        got, wanted = getattr(result.stats, name).cpu(), getattr(expected, name)
        assert got.dtype == torch.int64
        assert torch.equal(got[clear], wanted[clear]), f"{name}: {got} instead of {wanted}"
    for name in ("density", "coverage", "row_coverage", "min_row_coverage"):
        got, wanted = getattr(result.stats, name).cpu(), getattr(expected, name)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double()[clear], wanted[clear], atol=1e-5, rtol=1e-5, equal_nan="row" in name)
    if result.stats.js_distance.isnan().all() and (expected.js_distance.isnan() | (expected.density == 0)).all():
        return  # hybrid selection has none
    squares = result.stats.js_distance.cpu().double() ** 2, expected.js_distance**2
    defined = ~(squares[0].isnan() | squares[1].isnan())
    assert underflow or defined.all()
    torch.testing.assert_close(squares[0][defined], squares[1][defined], atol=2e-6, rtol=1e-4)


def assert_one_list(counts: Tensor, indices: Tensor) -> None:
    """Contiguous int32 of one device, ascending, in range, 0 past the count."""
    assert counts.dtype == indices.dtype == torch.int32 and counts.device == indices.device
    assert counts.is_contiguous() and indices.is_contiguous()
    assert counts.min() >= 0 and counts.max() <= indices.shape[-1]
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    assert (indices[~listed] == 0).all(), "entries past the count"
    assert indices.min() >= 0 and indices.max() < indices.shape[-1], "an index is out of range"
    assert ((indices.diff(dim=-1) > 0) | ~listed[..., 1:]).all(), "indices do not ascend"


def assert_well_formed(result: Chosen) -> None:
    """Index lists as FlexAttention needs them: contiguous int32, ascending, 0 past the count, disjoint, as in `keep`."""
    assert result.keep is not None
    shape = result.keep.shape
    for counts, indices in (result.lists[:2], result.lists[2:]):
        assert (counts.shape, indices.shape) == (shape[:-1], shape)
        assert_one_list(counts, indices)
    partial, full = kept_by_lists(result)
    assert not (partial & full).any(), "a block is in both lists"
    assert torch.equal(partial | full, result.keep)


def assert_as_the_oracle(
    result: Chosen, expected: ReferenceResult, drawn: Drawn | None = None, underflow: bool = False
) -> Tensor:
    """Well-formed lists, and the oracle's blocks and statistics; returns which heads were too close."""
    assert_well_formed(result)
    close = assert_same_blocks(result, expected)
    if drawn is not None:
        drawn.add(expected)
    assert_same_statistics(result, expected, underflow=underflow)
    return close


def compare_drawn(drawn_cases: SearchStrategy[Case], examples: int, select: Callable[[Case], Chosen] = Case.select) -> Drawn:
    """Compare drawn cases with the oracle, few of their heads close; returns the heads that were drawn."""
    drawn = Drawn()

    @settings(max_examples=examples)
    @given(drawn_cases)
    def run(case: Case) -> None:
        assert_as_the_oracle(select(case), case.reference(), drawn, case.config.method == "published")

    run()
    drawn.check_close()
    return drawn


def known_lengths(q_len: int, kv_len: int, block_size: int) -> tuple[int, int]:
    """The lengths in a BlockMask's shape: torch 2.5 rounds up to whole blocks."""
    if KNOWS_LENGTHS:
        return q_len, kv_len
    return q_len + -q_len % block_size, kv_len + -kv_len % block_size


def assert_consistent(block_mask: BlockMask, lengths: Sequence[int]) -> None:
    """A BlockMask's lists, to_dense(), sparsity() and mask_mod agree, pair by pair."""
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
    kept = partial | full
    # releases before torch 2.14 divide by all pairs
    everything = kept.numel() * size**2 if RELEASE >= (2, 14) else batch * num_heads * math.prod(known)
    assert math.isclose(block_mask.sparsity(), 100 * (1 - int(kept.sum()) * size**2 / everything), abs_tol=1e-3)


TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}


def assert_same_attention(out: Tensor, expected: Tensor) -> None:
    """Within 2e-5 of float64 for float32, 1e-2 for halves; rows that see nothing are exactly 0."""
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), atol=tolerance, rtol=tolerance)
    assert not out.cpu()[expected.cpu().abs().sum(-1) == 0].any()
