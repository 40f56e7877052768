"""The report of an inspection: one HTML page that loads nothing, without a script, and one file of figures."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from flexmask.plot import plot_attention, plot_density

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flexmask.integrations.inspect import Inspection, ShownHead

RULE = (
    "Of the heads that ran sparse: the one of the lowest density, of the median density, of the highest density, and of the "
    "lowest coverage, where the method computes it."
)
NAMED = "named"
_MOST_CHARACTERS = 400  # of the prompt, at its beginning and at its end


def write_report(inspection: Inspection, folder: str | Path, *, model: str | None = None, prompt: str = "") -> Path:
    """Write ``report.html``, which loads nothing, and ``inspection.json`` into a folder, which is created if need be.

    `inspection` is from `inspect_prefill`; `model` is the model's name, by default its class's; the page shows the beginning and
    the end of the text `prompt`. Replaces files of these names once all is drawn. Needs matplotlib. Returns the page's path.
    """
    folder = Path(folder)
    text = page(inspection, model or str(inspection.about["model"]), prompt)
    figures = json.dumps(inspection.to_dict(), indent=1, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    # a tokenizer may decode half of a surrogate pair
    (folder / "report.html").write_bytes(text.encode("utf-8", errors="backslashreplace"))
    (folder / "inspection.json").write_bytes(figures.encode())
    return folder / "report.html"


def page(inspection: Inspection, model: str, prompt: str) -> str:
    title, about, rows = escape(f"Sparse prefill in {model}"), inspection.about, inspection.run.rows()
    where = f"{about['model']}, {about['tokens']:,} tokens, {about['dtype']}, on {about['device']}, torch {about['torch']}"
    rule = RULE if any(head.why != NAMED for head in inspection.heads) else ""
    none = "" if inspection.heads else "<p>The layers to show ran dense: there is no mask.</p>"
    layers, heads = len({row["layer"] for row in rows}), 1 + max(row["head"] for row in rows)
    size = (min(max(4.8, 1.6 + 0.42 * heads), 14), min(max(2.6, 1.6 + 0.3 * layers), 12))
    short = prompt if len(prompt) <= 2 * _MOST_CHARACTERS else f"{prompt[:_MOST_CHARACTERS]} ... {prompt[-_MOST_CHARACTERS:]}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p class="soft">{escape(f"{where}, transformers {about['transformers']}")}</p>
<pre class="scroll">{escape(str(inspection.summary))}</pre>
<h2>Heads</h2>
<div class="figures">{_figure(size, partial(plot_density, rows), "Share of its visible blocks that each head keeps.")}</div>
{_held(inspection)}
<h2>Masks over the true attention</h2>
<p>{escape(rule)} Attention is that of all rows, computed in full from the layer's queries and keys and
pooled to blocks: a cell is the mean share of a row's attention. Grey is what a picture leaves out.</p>
{none}{"".join(map(_shown, inspection.heads))}
<h2>Settings and prompt</h2>
<pre>{escape(_settings(inspection))}</pre>
<pre>{escape(short)}</pre>
</body>
</html>
"""


def _figure(size: tuple[float, float], draw: Callable[[Axes], object], caption: str) -> str:
    # pyplot would keep the figure
    from matplotlib.figure import Figure

    figure, written = Figure(figsize=size, dpi=130, layout="constrained"), io.BytesIO()
    draw(figure.subplots())
    figure.savefig(written, format="png")
    data, width = base64.b64encode(written.getvalue()).decode(), round(130 * size[0])
    image = f'<img alt="{escape(caption)}" width="{width}" src="data:image/png;base64,{data}">'
    return f'<figure style="max-width: {width}px">{image}<figcaption>{escape(caption)}</figcaption></figure>'


def _held(inspection: Inspection) -> str:
    """Attention held by quarter of the prompt, by layer."""
    if not inspection.held:
        return ""
    warning = "" if inspection.warning is None else f'<p class="warning">{escape(inspection.warning)}</p>\n'
    rows = [("all", inspection.held_by_quarter), *((str(layer), shares) for layer, shares in inspection.held.items())]
    lines = "".join(
        f"<tr><td>{layer}</td>{''.join(f'<td>{share:.1%}</td>' for share in quarters)}</tr>" for layer, quarters in rows
    )
    names = "".join(f"<th>{name}</th>" for name in ("layer", "first quarter", "second", "third", "last"))
    return f"""<h2>Attention held, by position</h2>
{warning}<p>Share of the true attention of eight query rows of each quarter of the prompt that the kept blocks hold,
mean over rows and heads.</p>
<div class="scroll"><table><tr>{names}</tr>{lines}</table></div>"""


def _shown(head: ShownHead) -> str:
    """True attention of one head, what its mask keeps of it, and what it leaves out."""
    row, lengths = head.row, (head.row["q_len"], head.row["kv_len"])
    about = f"Shown for: {head.why}. {row['pattern'].capitalize()}, density {row['density']:.1%}. The mask holds "
    about += f"{head.attention_kept:.1%} of all rows' attention"
    about += "." if math.isnan(row["coverage"]) else f", {row['coverage']:.1%} of the last rows'."
    if row["reason"]:
        about += f" This head's mask was not used: {row['reason']}."
    where = f"layer {head.layer}, head {head.head}"
    captions = {"all": f"Attention of {where}.", "kept": "Through the mask.", "left out": "Left out by the mask."}
    figures = "".join(
        _figure((4.9, 4.2), partial(plot_attention, head.mass, head.block_size, head.kept, part, lengths=lengths), caption)
        for part, caption in captions.items()
    )
    return f'<h3>{where.capitalize()}</h3>\n<p>{escape(about)}</p>\n<div class="figures">{figures}</div>\n'


def _settings(inspection: Inspection) -> str:
    settings = inspection.run.settings
    selector = settings.selector()
    options = {**selector.options, "block_size": selector.block_size}
    words = ", ".join(f"{name} {'by head' if isinstance(value, tuple) else value}" for name, value in options.items())
    by_layer = f"; options of their own in {len(settings.layers)} layers" if settings.layers else ""
    changed = ", ".join(f"{name} {value}" for name, value in settings.to_dict().items() if name != "layers")
    return f"method {settings.method}: {words}{by_layer}\nother than the defaults: {changed or 'nothing'}"


STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --soft: #5c5c66; --page: #ffffff; --card: #f4f4f7; --line: #d9d9e0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e9e9ee; --soft: #a9a9b5; --page: #17171b; --card: #222228; --line: #3a3a44; }
}
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
p { max-width: 46rem; } .soft { color: var(--soft); } .warning { font-weight: bold; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { flex: 1 1 22rem; min-width: 0; margin: 0; }
figure img { width: 100%; height: auto; display: block; background: #fff; border: 1px solid var(--line); }
figcaption { color: var(--soft); font-size: .85rem; }
td, th { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); overflow-wrap: normal; }
pre { background: var(--card); padding: .7rem; white-space: pre-wrap; font-size: .85rem; }
.scroll { overflow-x: auto; white-space: pre; }
"""
