"""The report's HTML: one file that loads nothing, without a script."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape

from flexmask.integrations.inspect import HOW_TIMED, NAMED, RULE, Inspection, ShownHead
from flexmask.report.images import Image, has


def page(found: Inspection, overview: Sequence[Image], shown: Sequence[Sequence[Image]], model: str, prompt: str) -> str:
    """The whole page; `overview` are pictures of all heads, `shown` of each head shown."""
    title = escape(f"Sparse prefill in {model}")
    heads = "".join(_shown(head, images) for head, images in zip(found.heads, shown, strict=True))
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
<div class="figures">{"".join(_figure(image, _caption(image, found)) for image in overview)}</div>
{_held(found)}
<h2>Masks over the true attention</h2>
<p>{escape(rule)} Attention is that of all rows, computed in full from the layer's queries and keys and
pooled to blocks: a cell is the mean share of a row's attention. Grey is what a picture leaves out.</p>
{none}{heads}
<h2>Time</h2>
{_times(found)}
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
        (_seconds(found.times.total), "forward pass"),
    ]
    items = "".join(f"<li><b>{value}</b>{escape(name)}</li>" for value, name in facts)
    where = (
        f"{about['model']}, {about['dtype']}, on {about['device']}, torch {about['torch']}, transformers {about['transformers']}"
    )
    return f'<p class="soft">{escape(where)}</p>\n<ul class="numbers">{items}</ul>'


def _figure(image: Image, caption: str) -> str:
    data = base64.b64encode(image.png).decode()
    width, height = (int.from_bytes(image.png[at : at + 4], "big") for at in (16, 20))  # of the PNG's first chunk
    shown = f'<img alt="{escape(image.alt)}" width="{width}" height="{height}" src="data:image/png;base64,{data}">'
    return f'<figure style="max-width: {width}px">{shown}<figcaption>{escape(caption)}</figcaption></figure>'


def _caption(image: Image, found: Inspection) -> str:
    tau = found.run.settings.selector().options.get("tau", 0)
    patterns = "Vertical-slash heads keep whole key blocks and block diagonals; query-aware heads keep blocks of their own."
    return {
        "density": "Share of its visible blocks that each head keeps. Attention costs as much.",
        "patterns": patterns if has(found.run.rows(), "js_distance") else "The method has one rule for all heads.",
        "distances": f"Distance of the pooled estimate to the true attention of the last rows. Heads below tau = {tau:g} (dot) "
        "are query-aware.",
        "coverage": "Share of the last rows' true attention that the kept blocks hold. A low value costs little in a head whose "
        "attention is diffuse, and much in a head that looks something up.",
    }[image.name]


def _held(found: Inspection) -> str:
    """Attention held by quarter of the prompt, by layer."""
    if not found.held:
        return ""
    warning = "" if found.warning is None else f'<p class="warning">{escape(found.warning)}</p>\n'
    rows = [("all", found.held_by_quarter), *((str(layer), each) for layer, each in found.held.items())]
    lines = "".join(
        f'<tr><td class="n">{layer}</td>{"".join(_number(f"{share:.1%}") for share in quarters)}</tr>' for layer, quarters in rows
    )
    names = "".join(f'<th class="n">{name}</th>' for name in ("layer", "first quarter", "second", "third", "last"))
    return f"""<h2>Attention held, by position</h2>
{warning}<p>Share of the true attention of eight query rows of each quarter of the prompt that the kept blocks hold,
mean over rows and heads.</p>
<div class="scroll"><table><tr>{names}</tr>{lines}</table></div>"""


def _shown(head: ShownHead, images: Sequence[Image]) -> str:
    row = head.row
    about = f"Shown for: {head.why}. {row['pattern'].capitalize()}, density {row['density']:.1%}. The mask holds "
    about += f"{head.attention_kept:.1%} of all rows' attention"
    about += "." if math.isnan(row["coverage"]) else f", {row['coverage']:.1%} of the last rows'."
    if row["reason"]:
        about += f" This head's mask was not used: {row['reason']}."
    captions = ("", "Through the mask; grey blocks are left out.", "Left out by the mask; grey blocks are kept.")
    figures = "".join(_figure(image, caption) for image, caption in zip(images, captions, strict=True))
    return f'<h3>Layer {head.layer}, head {head.head}</h3>\n<p>{escape(about)}</p>\n<div class="figures">{figures}</div>\n'


def _times(found: Inspection) -> str:
    stages, total = found.times.stages, max(found.times.total, 1e-9)
    bar = "".join(f'<span class="{name}" style="width:{100 * each / total:.2f}%"></span>' for name, each in stages.items())
    rows = "".join(
        f'<tr><td><span class="key {name}"></span>{name}</td><td class="n">{_seconds(each)}</td>'
        f'<td class="n">{each / total:.1%}</td></tr>'
        for name, each in stages.items()
    )
    return f'<div class="bar">{bar}</div>\n<table>{rows}</table>\n<p class="soft">{escape(HOW_TIMED)}</p>'


def _layers(found: Inspection) -> str:
    by_layer = {each.layer: each for each in found.times.layers}
    lines = []
    for layer in found.summary.layers:
        took = by_layer.get(layer.layer)
        patterns = ", ".join(f"{share:.0%} {name}" for name, share in layer.patterns.items())
        if layer.served_densely:
            patterns += f"; {layer.served_densely:.0%} served by dense attention, faster there"
        coverage = "" if layer.coverage is None else f"{layer.coverage:.1%}"
        cells = [
            f"{layer.density:.1%}",
            coverage,
            *(("", "") if took is None else (_seconds(took.selection), _seconds(took.call))),
        ]
        numbers = "".join(map(_number, cells))
        text = "".join(f"<td>{escape(cell)}</td>" for cell in (patterns, "; ".join(layer.reasons)))
        lines.append(f'<tr><td class="n">{layer.layer}</td><td>{layer.ran}</td>{numbers}{text}</tr>')
    names = ("density", "coverage", "selection", "whole call")
    head = '<th class="n">layer</th><th>ran</th>' + "".join(f'<th class="n">{name}</th>' for name in names)
    return f'<div class="scroll"><table><tr>{head}<th>heads</th><th>dense because</th></tr>{"".join(lines)}</table></div>'


def _number(text: str) -> str:
    return f'<td class="n">{text}</td>'


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


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
.bar { display: flex; height: 1.6rem; border: 1px solid var(--line); border-radius: .3rem; overflow: hidden; max-width: 46rem; }
.bar span { min-width: 0; } .selection { background: #f0a02f; } .attention { background: #1f5fa8; }
.rest { background: repeating-linear-gradient(45deg, #c9c9d2 0 6px, #b4b4bf 6px 8px); }
.key { display: inline-block; width: .9rem; height: .9rem; border-radius: .2rem; vertical-align: -.1rem; margin-right: .35rem; }
pre { background: var(--card); padding: .7rem; border-radius: .4rem; white-space: pre-wrap; font-size: .85rem; }
"""
