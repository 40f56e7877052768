"""Uses the public face as mypy sees it: code of a user, checked and not run."""

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from typing_extensions import assert_type

import flexmask
from flexmask.block_masks import hip_mask
from flexmask.mask_function import BlockProblem, MaskFunction, method


def attention(query: Tensor, key: Tensor, value: Tensor) -> None:
    assert_type(flexmask.sparse_attention(query, key, value, gamma=0.9), Tensor)
    assert_type(flexmask.sparse_attention(query, key, value, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flexmask.sparse_attention(query, key, value, return_stats=True), tuple[Tensor, flexmask.SelectionStats])
    both = flexmask.sparse_attention(query, key, value, "flexprefill", return_lse=True, return_stats=True)
    assert_type(both, tuple[Tensor, Tensor, flexmask.SelectionStats])
    flexmask.sparse_attention(query, key, value, block_size="128")  # type: ignore[call-overload]


def packed(query: Tensor, key: Tensor, value: Tensor) -> None:
    assert_type(flexmask.sparse_attention_varlen(query, key, value, [0, 10]), Tensor)
    _, stats = flexmask.sparse_attention_varlen(query, key, value, [0, 10], return_stats=True)
    assert_type(stats, tuple[flexmask.SelectionStats, ...])


def masks(query: Tensor, key: Tensor) -> None:
    assert_type(flexmask.hybrid_mask, MaskFunction)
    assert_type(hip_mask(query, key), BlockMask)
    assert_type(flexmask.flexprefill_mask(query, key, 0.95, 0.1, return_stats=True), tuple[BlockMask, flexmask.SelectionStats])
    flexmask.hybrid_mask(query)  # type: ignore[call-overload]


def own(query: Tensor, key: Tensor, value: Tensor) -> None:
    @method
    def diagonal_mask(problem: BlockProblem, *, blocks: int = 4) -> Tensor | None:
        return None

    assert_type(diagonal_mask(query, key, blocks=2), BlockMask)
    assert_type(flexmask.sparse_attention(query, key, value, diagonal_mask), Tensor)
