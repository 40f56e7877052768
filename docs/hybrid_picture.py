"""Draw docs/concepts/hybrid.png, the blocks that `hybrid` keeps in two heads, by rule: ``python docs/hybrid_picture.py``.

The heads are the retriever's, on a prompt of 4,096 tokens (a few seconds of CPU). The script refuses to draw other blocks than
`hybrid_mask` keeps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "concepts" / "hybrid.png"
TOKENS, BLOCK_SIZE, GAMMA, NEAREST, ROW_STRIDE = 4096, 64, 0.9, 2, 8
HEADS = ((1, 5), (0, 7))  # layer, head: attention on few blocks, and spread out
LEFT_OUT = "#e6e8ec"
# a block gets the first reason that holds; dark to light, so that it reads in grey too
REASONS = {
    "first block, nearest two": "#0b1f3f",
    "the block's own rows": "#2a6db8",
    "key blocks of the last rows": "#ef8a17",
    "the floor": "#8fd0c0",
    "the last rows, dense": "#8a6fb0",
}


def reasons() -> Tensor:
    """Number of each block's reason, -1 if left out and -2 above the diagonal, (layers * heads, num_q_blocks, num_kv_blocks)."""
    from bench.prompts.captured import retriever_prompt
    from flexmask import hybrid_mask, plain
    from flexmask.base.blocks import block_problem
    from flexmask.base.inputs import attention_inputs
    from flexmask.block_masks.hybrid import RULE
    from flexmask.block_masks.hybrid import plain as steps
    from flexmask.export import to_block_map

    query, key, _ = retriever_prompt(TOKENS, device="cpu", dtype=torch.float32)
    problem = block_problem(attention_inputs(query, key).with_offset(), BLOCK_SIZE, plain)
    gamma = torch.full(query.shape[1:2], GAMMA, dtype=torch.float64)
    last = plain.representative_mass(problem, "last")
    columns = steps.key_blocks(problem, last, gamma, RULE.last_row_multiple)[0, 0, :, None]
    own, own_and_floor = (
        steps.row_blocks(problem, ROW_STRIDE, gamma, RULE.row_multiple, coverage).blocks.chosen[0] for coverage in (0, 0.5)
    )
    row, column = torch.meshgrid(*(torch.arange(TOKENS // BLOCK_SIZE) for _ in range(2)), indexing="ij")
    found = (((row - column) < NEAREST) | (column == 0), own, columns, own_and_floor, row == row.max())

    visible = column <= row
    number = torch.where(visible, -1, -2).repeat(query.shape[1], 1, 1)
    for reason, blocks in reversed([*enumerate(found)]):
        number[blocks.expand_as(number) & visible] = reason
    options: dict[str, Any] = {"gamma": GAMMA, "block_size": BLOCK_SIZE, "min_budget": NEAREST * BLOCK_SIZE}
    kept = to_block_map(hybrid_mask(query, key, row_stride=ROW_STRIDE, min_coverage=0.5, **options))[0]
    if not torch.equal(number >= 0, kept):
        raise RuntimeError("the steps keep other blocks than hybrid_mask")
    return number


def draw() -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    number = reasons()
    figure = Figure(figsize=(9, 5.5), dpi=100, layout="constrained")
    for axes, (layer, head) in zip(figure.subplots(1, 2), HEADS, strict=True):
        shown = number[8 * layer + head]
        density = float((shown >= 0).sum() / (shown >= -1).sum())
        colours = ListedColormap(["#ffffff", LEFT_OUT, *REASONS.values()])
        axes.imshow(shown.numpy(), cmap=colours, vmin=-2, vmax=len(REASONS) - 1, interpolation="nearest")
        axes.set(xlabel="key block", ylabel="query block", title=f"layer {layer}, head {head}: {density:.1%} of the blocks")
        axes.spines[["top", "right"]].set_visible(False)
        print(f"layer {layer}, head {head}: {density:.1%}")
        for reason, name in enumerate(REASONS):
            print(f"  {name}: {float((shown == reason).sum() / (shown >= -1).sum()):.1%}")
    handles = [Patch(facecolor=colour, label=name) for name, colour in {**REASONS, "left out": LEFT_OUT}.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(TARGET)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    draw()
