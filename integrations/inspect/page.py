"""The report of an inspection: one HTML page that loads nothing, without a script, its pictures, and its figures as JSON."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flexmask.integrations.inspect.inspection import NAMED, RULE, Inspection, ShownHead
from flexmask.plot import plot_attention, plot_density

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Picture(NamedTuple):
    name: str  # of its file, without ``.png``
    alt: str
    caption: str
    png: bytes


def write_report(found: Inspection, folder: str | Path, *, model: str | None = None, prompt: str = "") -> Path:
    """Write ``report.html``, its pictures as PNG and ``inspection.json`` into a folder, which is created if need be.

    The page is one file that loads nothing. Nothing is written before all is drawn. Needs matplotlib.

    Parameters
    ----------
    found
        From `flexmask.integrations.huggingface.inspect_prefill`.
    folder
        Where to write; files of these names are replaced.
    model
        The model's name. Default: its class's.
    prompt
        The prompt's text; the page shows its beginning and end.

    Returns
    -------
    Path
        The page.
    """
    folder = Path(folder)
    density, shown = density_picture(found), [shown_pictures(head) for head in found.heads]
    files = {f"{picture.name}.png": picture.png for picture in [density, *(part for pictures in shown for part in pictures)]}
    text = page(found, density, shown, model or str(found.about["model"]), prompt)
    # a tokenizer may decode half of a surrogate pair
    files["report.html"] = text.encode("utf-8", errors="backslashreplace")
    files["inspection.json"] = json.dumps(found.to_dict(), indent=1, allow_nan=False).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder / "report.html"


def density_picture(found: Inspection) -> Picture:
    rows = found.run.rows()
    layers, heads = len({row["layer"] for row in rows}), 1 + max(row["head"] for row in rows)
    size = (min(max(4.8, 1.6 + 0.42 * heads), 14), min(max(2.6, 1.6 + 0.3 * layers), 12))
    alt = f"Density of each head by layer; {found.summary.density:.1%} in all."
    caption = "Share of its visible blocks that each head keeps. Attention costs as much."
    return Picture("density", alt, caption, _drawn(size, lambda axes: plot_density(rows, axes)))


def shown_pictures(shown: ShownHead) -> list[Picture]:
    """True attention of one head, what its mask keeps of it, and what it leaves out."""
    lengths, kept = (shown.row["q_len"], shown.row["kv_len"]), shown.attention_kept
    name = f"layer{shown.layer}-head{shown.head}"

    def drawn(part: str) -> bytes:
        return _drawn(
            (4.9, 4.2), lambda axes: plot_attention(shown.mass, shown.block_size, shown.kept, part, axes, lengths=lengths)
        )

    attention = f"attention of layer {shown.layer}, head {shown.head}"
    through = f"Through the mask, {kept:.1%} of it; grey blocks are left out."
    outside = f"Left out by the mask, {1 - kept:.1%} of it; grey blocks are kept."
    return [
        Picture(f"{name}-attention", f"True {attention} by blocks.", "", drawn("all")),
        Picture(f"{name}-kept", f"The {attention} in the blocks that its mask keeps.", through, drawn("kept")),
        Picture(f"{name}-left-out", f"The {attention} in the blocks that its mask leaves out.", outside, drawn("left out")),
    ]


def _drawn(size: tuple[float, float], draw: Callable[[Axes], object]) -> bytes:
    # pyplot would keep the figure
    from matplotlib.figure import Figure

    figure, written = Figure(figsize=size, dpi=130, layout="constrained"), io.BytesIO()
    draw(figure.subplots())
    figure.savefig(written, format="png")
    return written.getvalue()


def page(found: Inspection, density: Picture, shown: Sequence[Sequence[Picture]], model: str, prompt: str) -> str:
    """The whole page; `shown` are the pictures of each head shown."""
    title = escape(f"Sparse prefill in {model}")
    heads = "".join(_shown(head, pictures) for head, pictures in zip(found.heads, shown, strict=True))
    rule = RULE if any(head.why != NAMED for head in found.heads) else ""
    none = "" if found.heads else "<p>The layers to show ran dense: there is no mask.</p>"
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
{_facts(found)}
<h2>Heads</h2>
<div class="figures">{_figure(density)}</div>
{_held(found)}
<h2>Masks over the true attention</h2>
<p>{escape(rule)} Attention is that of all rows, computed in full from the layer's queries and keys and
pooled to blocks: a cell is the mean share of a row's attention. Grey is what a picture leaves out.</p>
{none}{heads}
<h2>Layers</h2>
{_layers(found)}
<h2>Settings and prompt</h2>
<pre>{escape(_settings(found))}</pre>
<pre>{escape(_excerpt(prompt))}</pre>
</body>
</html>
"""


def _facts(found: Inspection) -> str:
    summary, about = found.summary, found.about
    sparse = sum(layer.ran != "dense" for layer in summary.layers)
    density = "-" if summary.density is None else f"{summary.density:.1%}"
    facts = [
        (f"{about['tokens']:,}", "tokens"),
        (density, "of the query-key pairs kept (density); dense layers count as 100%"),
        (f"{sparse} of {len(summary.layers)}", "layers sparse"),
    ]
    items = "".join(f"<li><b>{value}</b>{escape(name)}</li>" for value, name in facts)
    where = (
        f"{about['model']}, {about['dtype']}, on {about['device']}, torch {about['torch']}, transformers {about['transformers']}"
    )
    low = "" if summary.warning is None else f'<p class="warning">{escape(summary.warning)}</p>'
    return f'<p class="soft">{escape(where)}</p>\n<ul class="numbers">{items}</ul>\n{low}'


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    width, height = (int.from_bytes(picture.png[at : at + 4], "big") for at in (16, 20))  # of the PNG's first chunk
    image = f'<img alt="{escape(picture.alt)}" width="{width}" height="{height}" src="data:image/png;base64,{data}">'
    return f'<figure style="max-width: {width}px">{image}<figcaption>{escape(picture.caption)}</figcaption></figure>'


def _held(found: Inspection) -> str:
    """Attention held by quarter of the prompt, by layer."""
    if not found.held:
        return ""
    warning = "" if found.warning is None else f'<p class="warning">{escape(found.warning)}</p>\n'
    rows = [("all", found.held_by_quarter), *((str(layer), shares) for layer, shares in found.held.items())]
    lines = "".join(
        f'<tr><td class="n">{layer}</td>{"".join(_number(f"{share:.1%}") for share in quarters)}</tr>' for layer, quarters in rows
    )
    names = "".join(f'<th class="n">{name}</th>' for name in ("layer", "first quarter", "second", "third", "last"))
    return f"""<h2>Attention held, by position</h2>
{warning}<p>Share of the true attention of eight query rows of each quarter of the prompt that the kept blocks hold,
mean over rows and heads.</p>
<div class="scroll"><table><tr>{names}</tr>{lines}</table></div>"""


def _shown(head: ShownHead, pictures: Sequence[Picture]) -> str:
    row = head.row
    about = f"Shown for: {head.why}. {row['pattern'].capitalize()}, density {row['density']:.1%}. The mask holds "
    about += f"{head.attention_kept:.1%} of all rows' attention"
    about += "." if math.isnan(row["coverage"]) else f", {row['coverage']:.1%} of the last rows'."
    if row["reason"]:
        about += f" This head's mask was not used: {row['reason']}."
    figures = "".join(map(_figure, pictures))
    return f'<h3>Layer {head.layer}, head {head.head}</h3>\n<p>{escape(about)}</p>\n<div class="figures">{figures}</div>\n'


def _layers(found: Inspection) -> str:
    lines = []
    for layer in found.summary.layers:
        patterns = ", ".join(f"{share:.0%} {name}" for name, share in layer.patterns.items())
        if layer.served_densely:
            patterns += f"; {layer.served_densely:.0%} served by dense attention, faster there"
        shares = ("" if share is None else f"{share:.1%}" for share in (layer.density, layer.coverage, layer.lowest))
        text = "".join(f"<td>{escape(cell)}</td>" for cell in (patterns, "; ".join(layer.reasons)))
        lines.append(f'<tr><td class="n">{layer.layer}</td><td>{layer.ran}</td>{"".join(map(_number, shares))}{text}</tr>')
    head = '<th class="n">layer</th><th>ran</th>' + "".join(f'<th class="n">{n}</th>' for n in ("density", "coverage", "lowest"))
    return f'<div class="scroll"><table><tr>{head}<th>heads</th><th>dense because</th></tr>{"".join(lines)}</table></div>'


def _number(text: str) -> str:
    return f'<td class="n">{text}</td>'


def _settings(found: Inspection) -> str:
    settings = found.run.settings
    selector = settings.selector()
    options = {**selector.options, "block_size": selector.block_size}
    words = ", ".join(f"{name} {'by head' if isinstance(value, tuple) else value}" for name, value in options.items())
    by_layer = f"; options of their own in {len(settings.layers)} layers" if settings.layers else ""
    changed = ", ".join(f"{name} {value}" for name, value in settings.to_dict().items() if name != "layers")
    return f"method {settings.method}: {words}{by_layer}\nother than the defaults: {changed or 'nothing'}"


def _excerpt(prompt: str, most: int = 400) -> str:
    return prompt if len(prompt) <= 2 * most else f"{prompt[:most]} ... {prompt[-most:]}"


STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --soft: #5c5c66; --page: #ffffff; --card: #f4f4f7; --line: #d9d9e0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e9e9ee; --soft: #a9a9b5; --page: #17171b; --card: #222228; --line: #3a3a44; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p, li { max-width: 46rem; } .soft { color: var(--soft); } .warning { font-weight: bold; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { flex: 1 1 22rem; min-width: 0; margin: 0; }
figure img { width: 100%;
  height: auto; display: block; background: #fff; padding: .4rem; border: 1px solid var(--line); border-radius: .4rem; }
figcaption { color: var(--soft); font-size: .85rem; padding: .3rem .1rem; }
.numbers { display: flex; flex-wrap: wrap; gap: .6rem; padding: 0; list-style: none; }
.numbers li { flex: 1 1 9rem; background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.numbers b { display: block; font-size: 1.35rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .8rem .25rem 0;
  text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: normal; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: var(--card); padding: .7rem; border-radius: .4rem; white-space: pre-wrap; font-size: .85rem; }
"""
