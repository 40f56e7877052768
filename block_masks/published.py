"""The block sets of FlexPrefill's published code, for parity."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from flexmask import plain
from flexmask.base.head_groups import plain_bytes
from flexmask.base.inputs import AttentionInputs
from flexmask.base.option_checks import check_max_budget
from flexmask.base.scores import ranks, running_sums
from flexmask.base.selection import Choice, block_lists
from flexmask.base.visibility import by_distance, num_blocks
from flexmask.block_masks.flexprefill.plain import estimated_attention
from flexmask.mask_function import BlockProblem, ByHead, Method, count_option, mask_function, share_option
from flexmask.plain import blocks_kept_always, blocks_on_lines, pooled_map


@dataclass(frozen=True, eq=False)
class Published(Method):
    """The block sets of FlexPrefill's published code, for whole unpadded prompts of a multiple of the block.

    Unlike `flexprefill_mask`:

    - budgets count sorted *tokens* and become blocks by ``// 128 + 1``, whatever the block size;
    - a slash counts only for the block diagonal of its offset's block;
    - a probability that underflows to 0 makes the distance NaN, hence the head vertical-slash;
    - a query-aware head keeps flattened blocks while their sum stays at or under gamma times the number of key blocks;
    - pooled scores have no term for short blocks.

    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: github.com/bytedance/FlexPrefill at a24b27b.

    Differs from the published code: scores are float32 (it rounds them to the input's dtype, which moves a few heads in
    bfloat16); its dense shortcut for short prompts is left out; at gamma 1 rounding does not decide.

    Parameters
    ----------
    gamma, tau, min_budget, max_budget
        As in `flexprefill_mask`; the budgets bound the counts of key blocks and of block diagonals, in blocks.
    softcap, window, attention_mask, q_offset
        Refused.

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> published_mask(query, key, gamma=0.9, block_size=64, min_budget=128).shape
    (1, 4, 512, 512)
    """

    needs_whole_blocks = True

    gamma: ByHead = 0.95
    tau: float = share_option(0.1, "[0, 1]")
    _: KW_ONLY
    min_budget: int = count_option(1024, 0, "tokens")
    max_budget: int | None = None

    def select(self, problem: BlockProblem) -> Choice:
        size, visibility, gamma = problem.block_size, problem.visibility, problem.as_tensor(self.gamma)
        blocks = visibility.visible.shape[-1]
        least, cap = num_blocks(self.min_budget, size), None if self.max_budget is None else num_blocks(self.max_budget, size)
        most = blocks if cap is None else min(cap, blocks)
        last, key_means = plain.representative_mass(problem, "last"), problem.key_means()
        # the published scores have no term for the number of keys
        counts = torch.ones_like(problem.key_counts())

        by_token = (last.attention.mean(2), by_distance(last.attention, last.rows.position[:, None]).mean(2))
        vertical, slash = (tokens.unflatten(-1, (blocks, size)).sum(-1) for tokens in by_token)
        distance = _distance_with_nan(estimated_attention(problem, last.rows, key_means, counts), vertical)
        is_query_aware = distance < problem.as_tensor(self.tau)
        num_vertical, num_slash = (
            torch.where(is_query_aware, min(least, most), _budget(tokens, gamma).clamp(min=least).clamp(max=most))
            for tokens in by_token
        )

        ordered, order = pooled_map(problem, key_means, counts).flatten(2).sort(dim=-1, descending=True, stable=True)
        limit = gamma.unsqueeze(-1)
        # scatter before comparing: Inductor 2.11 cannot fuse the comparison into a long running sum
        sums = running_sums(ordered, gamma.dtype)
        sums = torch.zeros_like(sums).scatter(-1, order, sums)
        # at gamma 1 rounding must not decide
        query_aware = ((sums <= limit * blocks) | (limit >= 1)).unflatten(-1, (blocks, blocks)) & is_query_aware[..., None, None]

        keep = blocks_on_lines(_top(vertical, num_vertical), _top(slash, num_slash), visibility) | query_aware
        keep = (keep | blocks_kept_always(problem)) & problem.visible
        return Choice(
            block_lists(keep, visibility.full),
            keep,
            {
                "is_query_aware": lambda _: is_query_aware,
                "js_distance": lambda _: distance,
                "num_vertical_blocks": lambda _: num_vertical,
                "num_slash_blocks": lambda _: num_slash,
                "coverage": lambda keep: plain.coverage(problem, last, keep),
            },
        )

    def check(self) -> None:
        check_max_budget(self.max_budget, self.min_budget)

    def check_call(self, inputs: AttentionInputs) -> None:
        """Refuse what the published code cannot do."""
        refused = {name: getattr(inputs, name) for name in ("softcap", "window", "attention_mask")}
        # of a chunk the lengths are refused
        refused["q_offset"] = inputs.offset if inputs.query.shape[2] == inputs.key.shape[2] else None
        for name, value in refused.items():
            if value is not None:
                raise ValueError(f"method 'published' takes no {name}; use method 'flexprefill'")

    def selection_bytes(self, inputs: AttentionInputs, by_kernels: bool) -> int:
        # sums by offset take int64 indices
        return plain_bytes(inputs, self.block_size, 72 if self.tau > 0 else 56, 32)


published_mask = mask_function("published", Published)


def _budget(tokens: Tensor, gamma: Tensor) -> Tensor:
    """Blocks by the published rule: tokens whose running sum stays at or under gamma, plus one, ``// 128 + 1``."""
    # not sort: for it Inductor (2.13, 2.14) guards kv_len < 32767, and by that bound makes tiles that take minutes to compile
    running = running_sums(tokens.topk(tokens.shape[-1]).values, gamma.dtype)
    limit = gamma.unsqueeze(-1)
    return (((running <= limit) | (limit >= 1)).sum(-1) + 1) // 128 + 1


def _top(values: Tensor, count: Tensor) -> Tensor:
    """The `count` largest entries, with the first one always among them."""
    values = values.clone()
    values[..., 0] = float("inf")
    return ranks(values, torch.ones_like(values, dtype=torch.bool)) < count.clamp(min=1).unsqueeze(-1)


def _distance_with_nan(estimated: Tensor, true: Tensor) -> Tensor:
    """Jensen-Shannon distance where 0 * log 0 is NaN."""
    middle = (estimated + true) / 2
    divergence = (estimated * (estimated / middle).log()).sum(-1) + (true * (true / middle).log()).sum(-1)
    return (divergence / 2).clamp(min=0).sqrt()
