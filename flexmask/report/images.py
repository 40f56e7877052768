"""The pictures of a report, as PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from flexmask.integrations.inspect import Inspection, ShownHead
from flexmask.plot import plot_attention, plot_coverage, plot_density, plot_distances, plot_pattern_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS = (("all", "attention"), ("kept", "kept"), ("left out", "left-out"))


class Image(NamedTuple):
    """One picture: its file name without ``.png``, its alternative text, and its bytes."""

    name: str
    alt: str
    png: bytes


def head_images(found: Inspection) -> list[Image]:
    """Density and patterns; distances and coverage where the method computes them."""
    rows = found.run.rows()
    layers, heads = len({row["layer"] for row in rows}), 1 + max(row["head"] for row in rows)
    size = (min(max(4.8, 1.6 + 0.42 * heads), 14), min(max(2.6, 1.6 + 0.3 * layers), 12))
    density = found.summary.density
    images = [
        _image("density", f"Density of each head by layer; {density:.1%} in all.", size, lambda axes: plot_density(rows, axes)),
        _image(
            "patterns",
            "Share of the heads by pattern, layer by layer.",
            (min(max(4.8, 1.8 + 0.3 * layers), 14), 3.2),
            lambda axes: plot_pattern_share(rows, axes),
        ),
    ]
    tau = found.run.settings.selector().options.get("tau")
    if has(rows, "js_distance"):
        alt = "Jensen-Shannon distance of each head by layer."
        images.append(_image("distances", alt, size, lambda axes: plot_distances(rows, axes, tau=tau)))
    if has(rows, "coverage"):
        alt = "Coverage of each head by layer."
        images.append(_image("coverage", alt, size, lambda axes: plot_coverage(rows, axes)))
    return images


def has(rows: list[dict[str, Any]], statistic: str) -> bool:
    """True if a head that ran sparse has the statistic."""
    return any(row["pattern"] != "dense" and not math.isnan(row[statistic]) for row in rows)


def shown_head_images(shown: ShownHead) -> list[Image]:
    """True attention of one head, what its mask keeps of it, and what it leaves out."""
    lengths = (shown.row["q_len"], shown.row["kv_len"])
    where = f"layer {shown.layer}, head {shown.head}"

    def drawn(part: str) -> Callable[[Axes], object]:
        return lambda axes: plot_attention(shown.mass, shown.block_size, shown.kept, part, axes, lengths=lengths)

    alts = {
        "all": f"True attention of {where} by blocks.",
        "kept": f"Attention of {where} in the blocks that its mask keeps: {shown.attention_kept:.1%} of all.",
        "left out": f"Attention of {where} in the blocks that its mask leaves out: {1 - shown.attention_kept:.1%} of all.",
    }
    return [_image(f"layer{shown.layer}-head{shown.head}-{name}", alts[part], (4.9, 4.2), drawn(part)) for part, name in _PARTS]


def _image(name: str, alt: str, size: tuple[float, float], draw: Callable[[Axes], object]) -> Image:
    # pyplot would keep the figure
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=130, layout="constrained")
    draw(figure.subplots())
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return Image(name, alt, written.getvalue())
