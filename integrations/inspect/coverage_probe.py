"""Measures the coverage of a prefill's masks: the share of the true attention that their kept blocks hold."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from flexmask import plain
from flexmask.base.blocks import block_problem
from flexmask.base.head_groups import head_groups
from flexmask.base.inputs import AttentionInputs, without_autocast
from flexmask.base.scores import capped, grouped_scores
from flexmask.base.visibility import split_into_blocks, visible_keys
from flexmask.integrations.huggingface.call import LayerCall


class CoverageProbe:
    """A scope's probe, which runs the calls of one prompt's prefill and measures the coverage of their masks."""

    def __init__(self, heads: Collection[tuple[int, int]]) -> None:
        self._heads = heads
        self.coverage: dict[int, Tensor] = {}  # by layer: `coverage_by_quarter` of its heads, (num_heads, 4)
        # by layer and head, of `heads`: `block_attention`, and the map of its kept blocks
        self.maps: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, call: LayerCall) -> Tensor:
        plan = call.plan()
        result, reason = plan.attend(call.inputs, with_maps=True), plan.reason
        if reason is None:
            inputs, block_size, coverage = call.inputs.for_attention(), call.settings.block_size, []
            heads = head_groups(inputs.query, inputs.key, 1)
            for group, selection in result.selections:
                keep = selection.keep
                if keep is None:  # the selection keeps every visible block
                    keep = block_problem(inputs.slice_heads(group), block_size, plain).visible
                keep = keep[0].expand(group.query_heads.stop - group.query_heads.start, -1, -1)
                for head, kept in zip(range(group.query_heads.start, group.query_heads.stop), keep, strict=True):
                    head_inputs = inputs.slice_heads(heads[head])
                    coverage.append(coverage_by_quarter(head_inputs, kept, block_size))
                    if (call.layer, head) in self._heads:
                        self.maps[call.layer, head] = block_attention(head_inputs, block_size), kept.cpu()
            # if a model calls the layer repeatedly (DiffLlama, HRM), its last call counts, as in the rows of `inspect_prefill`
            self.coverage[call.layer] = torch.stack(coverage)
        return result.out


def block_attention(inputs: AttentionInputs, block_size: int) -> Tensor:
    """Mean attention of each query block's valid rows to each key block, (num_q_blocks, num_kv_blocks) float32 on the CPU.

    `inputs` have one head of one batch row. NaN in query blocks without a valid row; with sinks rows sum to less than 1.
    """
    rows = torch.arange(inputs.query.shape[2], device=inputs.query.device)
    return torch.stack([_attention_by_block(inputs, part, block_size).nanmean(0).cpu() for part in rows.split(block_size)])


def coverage_by_quarter(inputs: AttentionInputs, keep: Tensor, block_size: int, rows: int = 8) -> Tensor:
    """Share of the true attention that kept blocks hold, mean over `rows` evenly spaced rows of each quarter of the query.

    `inputs` have one head of one batch row, `keep` is (num_q_blocks, num_kv_blocks) bool. Returns (4,) float32 on the CPU, NaN in
    a quarter without a valid row. Sinks do not count.
    """
    middles = torch.arange(4 * rows, device=inputs.query.device) + 0.5
    sampled_rows = (middles * inputs.query.shape[2] / (4 * rows)).long()
    attention = _attention_by_block(inputs, sampled_rows, block_size)
    share = (attention * keep[sampled_rows // block_size]).sum(-1) / attention.sum(-1)
    return share.view(4, rows).nanmean(1).cpu()


@torch.no_grad()
def _attention_by_block(inputs: AttentionInputs, rows: Tensor, block_size: int) -> Tensor:
    """Attention of some rows of one head to each key block, (rows, num_kv_blocks) float32; NaN in rows that are not valid."""
    with without_autocast(inputs.query.device):
        tokens = inputs.tokens()
        is_valid = tokens.row_valid[0, rows]
        is_visible = visible_keys(tokens.offset[0] + rows, is_valid, tokens, inputs.window)[0]
        scores = capped(grouped_scores(inputs.query[:, :, rows], inputs.key)[0, 0] * inputs.scale, inputs.softcap)
        scores = scores.masked_fill_(~is_visible, -torch.inf)
        if inputs.sinks is not None:
            scores = torch.cat([scores, inputs.sinks.float().expand(len(rows), 1)], 1)
        attention = split_into_blocks(scores.softmax(-1)[:, : is_visible.shape[1]], block_size).sum(-1)
        return torch.where(is_valid[:, None], attention, torch.nan)
