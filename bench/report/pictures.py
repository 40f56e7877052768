"""Draw masks: ``python -m bench.report.pictures``; ``gallery`` is the picture of block_masks/README.md."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.prompts.captured import retriever_prompt
from flexmask import block_masks, flexprefill_mask
from flexmask.pictures.style import HIDDEN, IN_PART, LEFT_OUT, WHOLE
from flexmask.plot import block_kinds, plot_block_mask

SHORT, LONG = 8192, 16384
# gallery: chosen to show each shape, not to compare
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "oracle": {"gamma": 0.9},
    "hybrid": {"gamma": 0.8, "min_budget": 256},
    "flexprefill": {"gamma": 0.9, "min_budget": 256},
    "published": {"gamma": 0.9, "min_budget": 256},
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
COLUMNS = 4


def captured(tokens: int) -> tuple[Tensor, Tensor]:
    """Query and key of the retriever's layers 0 and 1, 16 heads."""
    shape: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 4, "device": "cpu", "dtype": torch.float32}
    return retriever_prompt(tokens, layers=(0, 1), **shape)[:2]


def draw_masks(folder: Path) -> None:
    """Masks by flexprefill of the query-aware and of the vertical-slash head of median density."""
    query, key = captured(LONG)
    mask: Any
    mask, stats = flexprefill_mask(query, key, return_stats=True)
    order = stats.density[0].argsort().tolist()
    kinds = [[head for head in order if bool(stats.is_query_aware[0, head]) == aware] for aware in (True, False)]
    heads = [kind[len(kind) // 2] for kind in kinds if kind]
    titles = [
        f"layer {head // 8}, head {head % 8}: {'query-aware' if stats.is_query_aware[0, head] else 'vertical-slash'}"
        for head in heads
    ]
    _save(plot_block_mask([mask] * len(heads), heads, titles)[0].figure, folder / "masks.png")


def draw_gallery(folder: Path) -> None:
    """Blocks that every method keeps of one head, for block_masks/README.md."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    query, key = captured(SHORT)
    figure = Figure(figsize=(2.4 * COLUMNS, 2.6 * -(-len(OPTIONS) // COLUMNS)), dpi=150, layout="constrained")
    axes = figure.subplots(-(-len(OPTIONS) // COLUMNS), COLUMNS).flat
    for axis, (name, own) in zip(axes, OPTIONS.items(), strict=False):
        mask = getattr(block_masks, f"{name}_mask")(query, key, block_size=64, **own)
        kinds = block_kinds(mask, 8 if mask.shape[1] > 1 else 0)
        axis.imshow(
            kinds.numpy(), cmap=ListedColormap([HIDDEN, LEFT_OUT, IN_PART, WHOLE]), vmin=0, vmax=3, interpolation="nearest"
        )
        density = (kinds >= 2).sum() / (kinds >= 1).sum()
        axis.set_title(f"{name}, {density:.0%}", fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    _save(figure, folder / "methods.png")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    print(path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "masks": draw_masks,
    "gallery": draw_gallery,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the named pictures, default both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], help="which; default: both")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder (out)")
    options = parser.parse_args(arguments)
    for name in options.names or PICTURES:
        PICTURES[name](options.out)


if __name__ == "__main__":
    main()
