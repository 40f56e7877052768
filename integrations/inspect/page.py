"""The report of an inspection: one HTML page without scripts, which loads nothing."""

from __future__ import annotations

import base64
import io
import json
import math
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexmask.plot import plot_attention, plot_density

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flexmask.integrations.inspect import Inspection, ShownHead

_MAX_CHARACTERS = 400  # of the prompt, at its beginning and at its end


def write_report(inspection: Inspection, path: str | Path, *, model: str | None = None, prompt: str = "") -> Path:
    """Draw the pictures and write them into one HTML page, which loads nothing. Creates the page's folder if needed.

    `inspection` is from `inspect_prefill`; `model` is the model's name, by default that of its class. The page shows the
    beginning and the end of the text `prompt`. Needs matplotlib. Returns the page's path.
    """
    path, text = Path(path), page(inspection, model or str(inspection.about["model"]), prompt)
    path.parent.mkdir(parents=True, exist_ok=True)
    # a tokenizer may decode half of a surrogate pair
    path.write_bytes(text.encode("utf-8", errors="backslashreplace"))
    return path


def page(inspection: Inspection, model: str, prompt: str) -> str:
    title, about, run = escape(f"Sparse prefill in {model}"), inspection.about, inspection.run
    conditions = f"{about['model']}, {about['tokens']:,} tokens, {about['dtype']}, on {about['device']}, torch {about['torch']}"
    excerpt = prompt if len(prompt) <= 2 * _MAX_CHARACTERS else f"{prompt[:_MAX_CHARACTERS]} ... {prompt[-_MAX_CHARACTERS:]}"
    method = run.settings.layer_method()
    options = {"method": run.method, **method.options, "block_size": method.block_size, **run.settings.to_dict()}
    heads = "".join(map(_head_section, inspection.heads)) or "<p>Every layer ran dense: there is no mask.</p>"
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
<p>{escape(f"{conditions}, transformers {about['transformers']}")}</p>
<pre class="scroll">{escape(str(run.summary()))}</pre>
{_figure(plot_density(run), "Share of its visible blocks that each head keeps.")}
{_coverage_table(inspection)}
<h2>Masks over the true attention</h2>
<p>A cell is the mean share of a row's attention that a key block gets: blue where the mask keeps the block, orange where it
leaves it out.</p>
{heads}
<h2>Settings and prompt</h2>
<pre>{escape(json.dumps(options))}</pre>
<pre>{escape(excerpt)}</pre>
</body>
</html>
"""


def _figure(axes: Axes, caption: str) -> str:
    import matplotlib.pyplot as plt

    figure: Any = axes.figure
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    plt.close(figure)
    data, width = base64.b64encode(picture.getvalue()).decode(), round(figure.get_dpi() * figure.get_figwidth())
    return f'<img alt="{escape(caption)}" style="max-width: {width}px" src="data:image/png;base64,{data}">'


def _coverage_table(inspection: Inspection) -> str:
    """Coverage by layer and quarter of the prompt."""
    if not inspection.coverage_by_quarter:
        return ""
    names = "".join(f"<th>{name}</th>" for name in ("layer", "first quarter", "second", "third", "last"))
    by_layer = inspection.coverage_by_quarter.items()
    rows = ((str(layer), *(f"{share:.1%}" for share in shares)) for layer, shares in by_layer)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"""<h2>Coverage by position</h2>
<p>Share of the true attention of eight query rows of each quarter of the prompt that falls into kept blocks,
mean over rows and heads.</p>
<div class="scroll"><table><tr>{names}</tr>{lines}</table></div>"""


def _head_section(head: ShownHead) -> str:
    """One head's section: its true attention under its mask."""
    row, title = head.row, f"Layer {head.layer}, head {head.head}"
    caption = f"Shown for: {head.why}. {row['pattern'].capitalize()}, density {row['density']:.1%}."
    if not math.isnan(row["row_coverage"]):
        caption += f" By hybrid's estimate its query blocks keep {row['row_coverage']:.1%} of their attention."
    if row["reason"]:
        caption += f" This head's mask was not used: {row['reason']}."
    axes = plot_attention(head.mass, head.block_size, head.kept, lengths=(row["q_len"], row["seq_len"]))
    return f"<h3>{title}</h3>\n<p>{escape(caption)}</p>\n{_figure(axes, f'Attention of {title}.')}\n"


STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
img { width: 100%; height: auto; display: block; background: #fff; }
td, th { padding: .25rem .8rem .25rem 0; text-align: right; overflow-wrap: normal; }
pre { white-space: pre-wrap; font-size: .85rem; }
.scroll { overflow-x: auto; white-space: pre; }
"""
