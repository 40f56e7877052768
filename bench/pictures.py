"""Draw every picture of the documents: ``python -m bench.pictures``, or ``make pictures``.

The heads are the trained retriever's, on a prompt with needles; the frontier is of the measured rows of ``bench/results``. The
pictures of ``bench/REPORT.md`` are drawn by ``make bench-report``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import draw_methods
from bench.demo import draw_two_heads, load_model
from bench.fidelity import results
from bench.fidelity.curves import CURVES, NAMES
from bench.fidelity.table import ABSD
from bench.prompts.captured import MODEL
from bench.retriever.task import make_prompt
from flexmask.integrations.huggingface import flexprefill
from flexmask.integrations.inspection import inspect_prefill
from flexmask.plot import plot_attention, plot_coverage, plot_density, plot_distances, plot_frontier, plot_pattern_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# of the pictures by head: blocks and floor are scaled to the short prompt
SHORT, LONG = 8192, 16384
SCALED: dict[str, Any] = {"gamma": 0.9, "block_size": 64, "min_budget": 256, "dense_below": 0}

ON_FRONTIER = ("hybrid", "coverage", "published", "xattention", "flash_prefill", "normalised_flash_prefill")


def draw_masks(folder: Path) -> None:
    """The masks of two heads, as the demo draws them."""
    model, prompt = load_model(MODEL, "cpu"), make_prompt(LONG, 16, 16)
    with torch.no_grad(), flexprefill(model, collect_masks=True, dense_below=0) as run:
        model.base_model(prompt.token_ids[None], use_cache=False)
    stats, masks = ([by_layer[layer][0] for layer in sorted(by_layer)] for by_layer in (run.stats, run.masks))
    print(draw_two_heads(stats, masks, folder / "masks.png"))  # type: ignore[arg-type]  # one of each


def draw_heads(folder: Path) -> None:
    """Density, patterns, distances and coverage of all heads, and the true attention of one beside its mask."""
    model, prompt = load_model(MODEL, "cpu"), make_prompt(SHORT, 16, 16)
    found = inspect_prefill(model, prompt.token_ids, **SCALED)
    rows = found.run.rows()
    for name, draw in (("density", plot_density), ("patterns", plot_pattern_share), ("coverage", plot_coverage)):
        _save(draw(rows), folder / f"{name}.png")
    _save(plot_distances(rows, tau=found.run.settings.config.tau), folder / "distances.png")
    from matplotlib.figure import Figure

    shown = next(head for head in found.heads if "median" in head.why)
    figure = Figure(figsize=(15, 4.8), dpi=110, layout="constrained")
    for axes, part in zip(figure.subplots(1, 3), ("all", "kept", "left out"), strict=True):
        plot_attention(shown.mass, shown.block_size, shown.kept, part, axes)
    figure.suptitle(f"Layer {shown.layer}, head {shown.head}, density {shown.row['density']:.2f}")
    path = folder / "attention.png"
    figure.savefig(path)
    print(path)


def draw_frontier(folder: Path) -> None:
    """Each method's loss by its density, on the real texts of ``bench/FIDELITY.md``."""
    measured = results.read()
    texts = sorted(text for text in measured.texts["causal"] if text.startswith("test/"))
    curves = {}
    for name in ON_FRONTIER:
        found = [measured.on(method, texts) for method in CURVES[name]]
        points = [(float(each[:, 0].mean()), float(each[:, ABSD].mean())) for each in found if each is not None]
        if points:
            curves[NAMES[name]] = points
    axes = plot_frontier(curves, error="mean change of a token's log-probability")
    _save(axes, folder / "frontier.png")


def draw_gallery(folder: Path) -> None:
    """The masks of every method of the gallery."""
    draw_methods.main(["--picture", str(folder.parent / "block_masks" / "methods.png")])


def _save(axes: Axes, path: Path) -> None:
    figure: Any = axes.figure
    figure.savefig(path)
    print(path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "masks": draw_masks,
    "heads": draw_heads,
    "frontier": draw_frontier,
    "gallery": draw_gallery,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], help="which; default: all")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the documents' pictures")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        PICTURES[name](options.out)


if __name__ == "__main__":
    main()
