"""One attention problem cut into blocks, as methods see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from flexmask.base.inputs import PositionedInputs
from flexmask.base.scores import block_means, widest_float
from flexmask.base.selection import BlockLists
from flexmask.base.visibility import (
    BlockVisibility,
    TokenValidity,
    block_visibility,
    last_valid_keys,
    max_seen_blocks_in_prompt,
    num_blocks,
    num_valid_keys,
)

# a float option as a method sees it: a 0-d tensor, or a number where kernels take it so or it is 0
FloatOption = float | Tensor


def is_off(option: FloatOption) -> bool:
    """True for the number 0, which switches a step off; False for every tensor, whose value is not read."""
    return not isinstance(option, Tensor) and option == 0


class Steps(Protocol):
    """The steps that methods share: `flexmask.plain` or `flexmask.kernels`. Parameters typed Any differ between the two.

    Kept lines are (2, batch, num_heads, num_kv_blocks), bool in plain steps and int8 in kernels: key blocks, then diagonals, or
    (1, ..) without these.
    """

    def key_means(self, problem: BlockProblem, /) -> Tensor: ...
    def representative_mass(self, problem: BlockProblem, subset: str, /, with_diagonals: bool = True) -> Any: ...
    def kept_blocks(
        self, problem: BlockProblem, kept_lines: Tensor, blocks: Any, nearest: int = 0, dense_rows: Any = None, /
    ) -> tuple[BlockLists, Tensor | None]: ...
    def coverage(self, problem: BlockProblem, mass: Any, keep: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class BlockProblem:
    """One attention problem cut into blocks.

    Attributes
    ----------
    inputs
        Checked query and key with scale, soft cap, window, padding and offset; a slice of the rows if the method has
        `floats_per_row`.
    block_size
        Tokens per block.
    """

    inputs: PositionedInputs
    block_size: int
    steps: Steps  # plain, or kernels
    with_map: bool = True  # the map of kept blocks is needed; plain steps make it in any case
    kernel_geometry: Any = None  # `flexmask.kernels.visibility.KernelGeometry`; None for plain steps
    geometry: BlockVisibility | None = None  # None: computed where it is read

    @property
    def by_kernels(self) -> bool:
        return self.kernel_geometry is not None

    @property
    def tokens(self) -> TokenValidity:
        """Positions of the rows, and valid rows and keys."""
        return self.inputs.tokens() if self.geometry is None else self.geometry.tokens

    @property
    def visibility(self) -> BlockVisibility:
        """Visible and full blocks, and the key blocks of each query block's first and last row."""
        return block_visibility(self.tokens, self.block_size, self.inputs.window) if self.geometry is None else self.geometry

    @property
    def visible(self) -> Tensor:
        """Blocks with a visible pair, (batch or 1, 1, num_q_blocks, num_kv_blocks) bool."""
        return self.visibility.visible[:, None]

    @property
    def diagonal_blocks(self) -> Tensor:
        """Key blocks at the positions of each query block's first and last row, shaped as `visible`, bool."""
        first, last = self.visibility.first_row_block.unsqueeze(-1), self.visibility.last_row_block.unsqueeze(-1)
        return ((self.kv_block == first) | (self.kv_block == last))[:, None]

    @property
    def kv_block(self) -> Tensor:
        return torch.arange(self.visibility.visible.shape[-1], device=self.visibility.visible.device)

    def as_tensor(self, option: Any, shape: tuple[int, ...] = ()) -> Tensor:
        """A float or per-head option as a tensor; a number fills `shape`."""
        if isinstance(option, Tensor):
            return option
        device = self.inputs.query.device
        return torch.full(shape, option, dtype=widest_float(device), device=device)

    def num_blocks_seen(self) -> Tensor:
        """Number of key blocks that each query block sees, (batch or 1, num_q_blocks) int."""
        return self.visibility.visible.sum(-1) if self.kernel_geometry is None else self.kernel_geometry.num_seen

    def max_num_blocks_seen(self) -> Tensor:
        """Largest number of key blocks that any query block of the whole prompt sees, (batch or 1,) int."""
        if self.kernel_geometry is not None:
            return cast(Tensor, self.kernel_geometry.max_seen)
        inputs, max_seen = self.inputs, self.num_blocks_seen().amax(-1)
        return max_seen_blocks_in_prompt(max_seen, inputs.end, inputs.prompt_len, self.block_size, inputs.window)

    def key_counts(self) -> Tensor:
        """Valid keys per key block, (batch or 1, num_kv_blocks) int64."""
        return num_valid_keys(self.tokens, self.block_size)

    def last_keys(self) -> Tensor:
        """Position of each key block's last valid key, (batch or 1, num_kv_blocks) int64; -kv_len without any."""
        return last_valid_keys(self.tokens, self.block_size)

    def key_means(self) -> Tensor:
        """Mean of each key block's valid keys, (batch, num_kv_heads, num_kv_blocks, head_dim) float32; 0 without any."""
        return self.steps.key_means(self)

    def query_means(self, blocks: int = 1) -> Tensor:
        """Mean of the valid rows of each `blocks` query blocks, (batch, num_heads, .., head_dim) float32; 0 without any."""
        valid = self.tokens.row_valid if self.tokens.has_attention_mask else None
        return block_means(self.inputs.query, valid, blocks * self.block_size)

    def first_block(self) -> Tensor:
        """Key block of the first valid key, (batch or 1, 1, 1, 1) int64."""
        return (self.key_counts() > 0).int().argmax(-1)[:, None, None, None]

    def first_blocks(self, count: int) -> Tensor:
        """The first `count` key blocks from that of the first valid key on, (batch or 1, 1, 1, num_kv_blocks) bool."""
        index = self.kv_block - self.first_block()
        return (index >= 0) & (index < count)

    def blocks_of_first_tokens(self, count: int) -> Tensor:
        """Key blocks that hold one of the first `count` valid keys, (batch or 1, 1, 1, num_kv_blocks) bool."""
        valid = self.key_counts()
        before = valid.cumsum(-1) - valid
        return ((before < count) & (valid > 0))[:, None, None]

    def nearest_diagonals(self, count: int | Tensor) -> Tensor:
        """Blocks on the `count` nearest block diagonals, (batch or 1, 1 or num_heads, num_q_blocks, num_kv_blocks) bool."""
        return self.visibility.first_row_block[:, None, :, None] - self.kv_block < count

    def blocks_within(self, distance: int) -> Tensor:
        """Blocks with a visible pair less than `distance` tokens apart, shaped as `visible`."""
        return block_visibility(self.tokens, self.block_size, min(distance, self.inputs.distance_limit)).visible[:, None]

    def last_query_blocks(self, count: int) -> Tensor:
        """The last `count` query blocks up to that of the last valid row, (batch or 1, 1, num_q_blocks, 1) bool."""
        q_block = torch.arange(num_blocks(self.tokens.row_valid.shape[-1], self.block_size), device=self.tokens.offset.device)
        # the last valid row is at the last valid key, also in a slice of rows
        last = (self.last_keys().amax(-1) - self.tokens.offset) // self.block_size
        return (q_block > (last - count).unsqueeze(-1))[:, None, :, None]


def block_problem(inputs: PositionedInputs, block_size: int, steps: Steps, call_end: Tensor | None = None) -> BlockProblem:
    """Cut a call into blocks, for plain steps; `call_end` as in `token_validity`."""
    geometry = block_visibility(inputs.tokens(call_end), block_size, inputs.window)
    return BlockProblem(inputs, block_size, steps, geometry=geometry)
