"""FlexPrefill: the paper's algorithm, step by step."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from torch import Tensor

from flexmask._torch import HAS_TRITON
from flexmask.base.blocks import FloatOption, is_off
from flexmask.base.head_groups import plain_bytes
from flexmask.base.inputs import AttentionInputs
from flexmask.base.option_checks import check_max_budget
from flexmask.base.selection import Choice, ChosenBlocks
from flexmask.base.visibility import num_blocks
from flexmask.block_masks.flexprefill import plain
from flexmask.mask_function import BlockProblem, ByHead, Method, choice_option, count_option, mask_function, share_option

if HAS_TRITON:
    from flexmask.block_masks.flexprefill import kernels


class _Steps(Protocol):
    """The method's own steps: `plain` or `kernels`."""

    def pattern_and_lines(
        self, problem: BlockProblem, pattern: Any, index: Any, key_means: Tensor, gamma: Tensor, tau: FloatOption, min_lines: int,
        max_lines: int | None, /,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
    def query_aware_blocks(
        self, problem: BlockProblem, key_means: Tensor, is_query_aware: Tensor, gamma: Tensor, rule: str,
        max_blocks: int | None, /,
    ) -> ChosenBlocks: ...  # fmt: skip


@dataclass(frozen=True, eq=False)
class FlexPrefill(Method):
    """FlexPrefill's block mask: the key blocks that each query block attends to, per head and input.

    If block means predict the attention of a head's last query block (Jensen-Shannon distance < `tau`), the head keeps the fewest
    blocks of its pooled map that reach `gamma`; else the fewest key blocks (verticals) and the fewest block diagonals (slashes).
    Every query block also keeps its first visible key block and its diagonal, every head the `min_budget` heaviest lines.

    Source: FlexPrefill (https://arxiv.org/abs/2502.20766), section 3, algorithms "Sparse Attention", "Sparse Pattern Search",
    "Vertical Slash Index Search" and "Query Aware Index Search".

    Differs from the paper: selection is by block (a slash counts for the two block diagonals it crosses), short and padded
    blocks weigh by their number of keys, prompts may be padded, chunked, windowed or soft-capped.

    Parameters
    ----------
    query, key, block_size, scale, softcap, window, attention_mask, q_offset, prompt_len
        As in `flexmask.sparse_attention`.
    gamma
        Share of the estimated attention to keep. Range (0, 1]; 1 keeps every visible block. Default 0.95 (the paper's for
        Llama-3.1 and GLM-4). Per head: a sequence of num_heads numbers, or a (num_heads,) floating tensor on query's device, not
        read on the host but clamped to (0, 1], NaN to 1.
    tau
        Jensen-Shannon distance below which a head is query-aware. Range [0, 1]; 0: none is. Default 0.1 (the paper's).
    return_stats
        Also return `SelectionStats`, which takes extra time.
    min_budget
        Tokens' worth of key blocks, and of block diagonals, to keep at least. Range >= 0, default 1024 (the paper's).
    max_budget
        Tokens' worth of key blocks, of block diagonals and, per query block of a query-aware head, of blocks to keep at most, not
        counting `min_budget` and the blocks always kept; overrides gamma. Range >= max(1, min_budget), or None (default, as the
        paper).
    query_aware
        ``"flatten"`` (default, as the paper) selects over a query-aware head's whole pooled map, ``"per_query"`` inside each row
        of blocks (the paper's appendix on alternative index construction).
    pattern_queries, index_queries
        Rows that decide a head's pattern, and rows of the vertical-slash index: ``"last"`` (default, as the paper) or
        ``"middle"`` (the paper's appendix on the representative query subset).

    Returns
    -------
    BlockMask
        Of shape (batch, num_heads, q_len, kv_len). Its mask_mod holds the block choice too, so uncompiled flex_attention agrees
        with the compiled kernel. For gradients, which need lists by key block, use `flexmask.sparse_attention`. 9 bytes per pair
        of blocks (0.3 GB for 32 heads at 128k tokens); while it is made up to 14 on CUDA, elsewhere 72, plus 12 per
        representative row and key (18 with a soft cap). Pickle, ``torch.save``, ``copy.deepcopy`` and ``to`` take the mask_mod
        along (``torch.load`` with ``weights_only=False``), except for a mask made inside ``torch.compile``.
    SelectionStats
        Only with `return_stats`.

    Raises
    ------
    TypeError, ValueError
        For wrong types, shapes, dtypes, devices or ranges, DTensors, tensors of ``torch.vmap`` or the meta device, and masks that
        take more than 16 GiB while they are made. No value of a tensor is read on the host; NaN affects only its head.

    Notes
    -----
    On CUDA it launches Triton kernels, on other accelerators torch compiles it, on CPUs it runs uncompiled; these may resolve
    ties differently. ``torch.compile(fullgraph=True)`` can trace it. Gradients do not flow through a mask.

    Within a partial block flex_attention multiplies hidden values by 0, so a NaN among them reaches the block's rows.
    `flexmask.sparse_attention` zeroes the values of padding and unused keys, not those that causality or a window hides.

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> mask = flexprefill_mask(query, key, gamma=0.9, block_size=64, min_budget=128)
    >>> mask.shape
    (1, 4, 512, 512)
    """

    has_kernels = True

    gamma: ByHead = 0.95
    tau: float = share_option(0.1, "[0, 1]")
    _: KW_ONLY
    min_budget: int = count_option(1024, 0, "tokens")
    max_budget: int | None = None
    query_aware: str = choice_option("flatten", "per_query")
    pattern_queries: str = choice_option("last", "middle")
    index_queries: str = choice_option("last", "middle")

    def select(self, problem: BlockProblem) -> Choice:
        shared_steps, gamma = problem.steps, problem.as_tensor(self.gamma, (problem.inputs.query.shape[1],))
        tau: FloatOption = self.tau if is_off(self.tau) else problem.as_tensor(self.tau)
        steps: _Steps = kernels if problem.by_kernels else plain
        size = problem.block_size
        min_lines = num_blocks(self.min_budget, size)
        max_lines = None if self.max_budget is None else num_blocks(self.max_budget, size)

        # step 1: attention of the representative rows, and its mass by key block and by block diagonal
        index = pattern = shared_steps.representative_mass(problem, self.index_queries)
        if self.pattern_queries != self.index_queries:
            pattern = shared_steps.representative_mass(problem, self.pattern_queries)

        # step 2: does attention follow block means?  step 3a: the lines of either kind of head
        key_means = problem.key_means()
        is_query_aware, distance, lines = steps.pattern_and_lines(
            problem, pattern, index, key_means, gamma, tau, min_lines, max_lines
        )

        # step 3b: blocks of the pooled map
        blocks = None
        if isinstance(tau, Tensor):
            blocks = steps.query_aware_blocks(problem, key_means, is_query_aware, gamma, self.query_aware, max_lines)

        # step 4: blocks kept always; step 5: lists
        lists, keep = shared_steps.kept_blocks(problem, lines, blocks)
        return Choice(
            lists,
            keep,
            {
                "is_query_aware": lambda _: is_query_aware,
                "js_distance": lambda _: distance,
                "num_vertical_blocks": lambda _: lines[0].sum(-1),
                "num_slash_blocks": lambda _: lines[1].sum(-1),
                "coverage": lambda keep: shared_steps.coverage(problem, index, keep),
            },
        )

    def check(self) -> None:
        check_max_budget(self.max_budget, self.min_budget)

    def keeps_every_block(self) -> bool:
        return bool(self.gamma == 1) and self.max_budget is None

    def selection_bytes(self, inputs: AttentionInputs, by_kernels: bool) -> int:
        size, subsets = self.block_size, 1 if self.pattern_queries == self.index_queries else 2
        if by_kernels:
            of_pairs = inputs.num_block_pairs(size) * (14 if self.tau > 0 else 9)
            of_representative_rows = num_blocks(inputs.key.shape[2], size) * 16 * size * subsets
            return of_pairs + of_representative_rows
        by_score = (12 if inputs.softcap is None else 18) + 4 * (subsets - 1)
        return plain_bytes(inputs, size, 72 if self.tau > 0 else 56, by_score)


flexprefill_mask = mask_function("flexprefill", FlexPrefill)
