"""Draw the blocks that every method of the gallery keeps of one head: ``python -m bench.draw_methods``.

The head is one of the trained retriever's, on a prompt with needles. Options are scaled to the short prompt, so that each method
leaves out as much as shows its shape; they are no comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from bench.prompts.captured import retriever_prompt
from flexmask.block_masks import MASKS
from flexmask.pictures.style import HIDDEN, IN_PART, LEFT_OUT, WHOLE
from flexmask.plot import block_kinds

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "oracle": {"gamma": 0.9},
    "flexprefill": {"gamma": 0.9, "min_budget": 256},
    "vertical_slash": {"vertical_size": 512, "slash_size": 512},
    "minference": {"plan": (500, 500)},
    "xattention": {"threshold": 0.8},
    "flash_prefill": {"alpha": 0.1},
    "sparge": {"similarity_threshold": 0.3, "cdf_threshold": 0.95},
    "hip": {"topk_blocks": 8},
    "infllm": {"topk_blocks": 8, "local_tokens": 512},
    "streaming_llm": {"sink_blocks": 4, "window_blocks": 16},
    "tri_shape": {"window_blocks": 8, "last_blocks": 4},
    "lm_infinite": {"local_tokens": 1024},
    "moa": {"plan": (256, 0.2)},
}
BLOCK_SIZE = 64
COLUMNS = 5


def draw(masks: dict[str, BlockMask], head: int, path: Path) -> Path:
    """Draw one head of each mask in a grid, as a PNG; a mask with one head for all shows that."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    rows = -(-len(masks) // COLUMNS)
    figure = Figure(figsize=(2.2 * COLUMNS, 2.4 * rows), dpi=150, layout="constrained")
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axis in axes[len(masks) :]:
        axis.remove()
    for axis, (name, mask) in zip(axes, masks.items(), strict=False):
        kinds = block_kinds(mask, head if mask.shape[1] > 1 else 0)
        axis.imshow(
            kinds.numpy(), cmap=ListedColormap([HIDDEN, LEFT_OUT, IN_PART, WHOLE]), vmin=0, vmax=3, interpolation="nearest"
        )
        density = (kinds >= 2).sum() / (kinds >= 1).sum()
        axis.set_title(f"{name}, {density:.2f}", fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the prompt, make the masks, draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--layer", type=int, default=1, help="layer of the retriever")
    parser.add_argument("--head", type=int, default=0, help="head of that layer, 0 to 7")
    parser.add_argument("--picture", type=Path, default=Path("block_masks/methods.png"), help="file to draw to")
    options = parser.parse_args(arguments)
    query, key, _ = retriever_prompt(
        options.prompt_tokens, layers=(options.layer,), num_heads=8, num_kv_heads=2, device="cpu", dtype=torch.float32
    )
    masks = {name: MASKS[name](query, key, block_size=BLOCK_SIZE, **own) for name, own in OPTIONS.items()}
    print(f"Layer {options.layer}, head {options.head}: {draw(masks, options.head, options.picture)}")


if __name__ == "__main__":
    main()
