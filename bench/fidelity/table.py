"""Draw the report from the measured rows: ``python -m bench.fidelity.table --markdown`` writes ``bench/FIDELITY.md``.

``--add FILE.jsonl ...`` first takes over what ``bench.fidelity.run`` wrote; without ``--markdown`` the report is printed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.fidelity import draw, sections, statistics, tasks
from bench.fidelity import results as measured
from bench.fidelity.compare import TASKS
from bench.fidelity.curves import CURVES, GAMMAS, NAMES, OTHERS, between, bounded, prototype, short, shown_name, signed
from bench.fidelity.results import Results

OUT = Path(__file__).parents[1] / "FIDELITY.md"
# what the tables say, and how they were made
INTRODUCTION, METHOD = (Path(__file__).parent / name for name in ("introduction.md", "measured.md"))
LONG_TASKS = {
    **{"32768/8": "one of 8, 32k", "32768/64": "one of 64, 32k", "65536/1": "one needle, 64k", "65536/64": "one of 64, 64k"},
    **{"131072/1": "one needle, 128k", "131072/64": "one of 64, 128k"},
}
# columns of a method's figures, and the errors that methods are compared at
DLOSS, ABSD = 1, 2
TARGETS = {DLOSS: (0.12, 0.08, 0.05, 0.03), ABSD: (0.32, 0.3, 0.25, 0.2, 0.17, 0.14)}


def prototype_curve(results: Results, texts: Sequence[str]) -> list[str]:
    """Settings of the prototype that were measured on all texts."""
    both = [(prototype(gamma), prototype(gamma, False)) for gamma in GAMMAS]
    chosen = [next((name for name in names if results.on(name, texts) is not None), None) for names in both]
    return [name for name in chosen if name]


def curves_of(results: Results, texts: Sequence[str]) -> dict[str, list[str]]:
    """Settings measured on all texts, by method; the prototype stands in for hybrid selection where that was not measured."""
    curves = {name: [each for each in settings if results.on(each, texts) is not None] for name, settings in CURVES.items()}
    if not curves["hybrid"]:
        curves["hybrid"] = prototype_curve(results, texts)
    return curves


def texts_table(results: Results, texts: Sequence[str], weights: np.ndarray) -> list[str]:
    """Every setting on the test texts, with intervals, and the two kinds of text apart."""
    kinds = [np.array([f"/{kind}/" in text for text in texts]) for kind in ("prose", "python")]
    lines = [
        "| method | density | change of loss | abs d | prose: density, loss, abs d | Python: density, loss, abs d |",
        "|---|---|---|---|---|---|",
    ]
    settings = [name for curve in curves_of(results, texts).values() for name in curve]
    for name in [*settings, *OTHERS]:
        found = results.on(name, texts)
        if found is None:
            continue
        draws = weights @ found
        cells = [shown_name(name)]
        for figure, shown in enumerate((short, signed, short)):
            cells.append(f"{shown(draws[0, figure])} {between(*statistics.interval(draws[1:, figure]), shown)}")
        for kind in kinds:
            density, loss, change = found[kind].mean(0)
            cells.append(f"{short(density)}, {signed(loss)}, {short(change)}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def needles_table(results: Results, texts: Sequence[str], asked: dict[str, str]) -> list[str]:
    """The retriever's answers by task, with the density there."""
    lines = [f"| method | {' | '.join(asked.values())} |", "|---|" + "---|" * len(asked)]
    settings = [name for curve in curves_of(results, texts).values() for name in curve]
    for name in ["dense", *settings, *OTHERS[1:]]:
        found = results.needles.get(name, {})
        if not any(task in found for task in asked):
            continue
        cells = ["dense" if name == "dense" else shown_name(name)]
        for task in asked:
            if task not in found:
                cells.append("")
                continue
            density, right, n = found[task]
            cells.append(f"{right} of {n} {between(*statistics.wilson(right, n))} at {short(density)}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def equal_error_table(results: Results, texts: Sequence[str], draws: int, figure: int, targets: Sequence[float]) -> list[str]:
    """Density at equal error for every method, and as a multiple of hybrid selection's; intervals if there are `draws`."""
    weights = statistics.bootstrap_weights(texts, draws)
    shown = short if figure == ABSD else signed
    lines = [f"| method | {' | '.join(shown(target) for target in targets)} |", "|---|" + "---|" * len(targets)]
    found = {}
    for name, settings in curves_of(results, texts).items():
        if not settings:
            continue
        measurements = [results.on(setting, texts) for setting in settings]
        drawn = np.stack([weights @ each for each in measurements if each is not None])  # (settings, draws, figures)
        found[name] = [statistics.density_at(target, drawn[..., 0], drawn[..., figure]) for target in targets]
    for name, columns in found.items():
        cells = [NAMES[name]]
        for column, base in zip(columns, found["hybrid"], strict=True):
            cell = short(column[0]) if np.isfinite(column[0]) else "-"
            compared = name != "hybrid" and np.isfinite(column[0]) and np.isfinite(base[0])
            if draws and cell != "-":
                cell += f" {bounded(*statistics.interval(column[1:]))}"
            if compared:
                cell += f"; {column[0] / base[0]:.2f}x"
                cell += f" {bounded(*statistics.ratio(column[1:], base[1:]), digits='.2f')}" if draws else ""
            cells.append(cell)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_texts(results: Results) -> list[str]:
    """The texts that no setting was chosen on."""
    return sorted(text for text in results.texts["causal"] if text.startswith("test/"))


def details(results: Results, texts: Sequence[str]) -> list[str]:
    """Every row on texts and needles, and density at equal error."""
    lines = ["## Every setting on the twelve texts", "", *texts_table(results, texts, statistics.bootstrap_weights(texts))]
    lines += ["", "## Every setting on needles", "", *needles_table(results, texts, TASKS)]
    if any(task in found for found in results.needles.values() for task in LONG_TASKS):
        lines += ["", "More distractors, and longer prompts:", "", *needles_table(results, texts, LONG_TASKS)]
    lines += ["", "## Density at equal error", "", "Equal mean absolute change of a log-probability (abs d):", ""]
    lines += equal_error_table(results, texts, statistics.DRAWS, ABSD, TARGETS[ABSD])
    lines += ["", "Equal change of the loss:", ""]
    lines += equal_error_table(results, texts, statistics.DRAWS, DLOSS, TARGETS[DLOSS])
    for kind, name in (("prose", "prose"), ("python", "Python sources")):
        lines += ["", f"Equal change of the loss on {name} alone:", ""]
        lines += equal_error_table(results, [text for text in texts if f"/{kind}/" in text], 0, DLOSS, TARGETS[DLOSS])
    return lines


def report(results: Results, path: Path = measured.PATH) -> str:
    """The report's text: what the tables say, the main ones, one part a question, then every row."""
    texts = test_texts(results)
    found = sections.all_measures(results, texts, path)
    lines = [INTRODUCTION.read_text(encoding="utf-8").rstrip()]
    parts = [sections.main_tables(found, results, path), sections.time(found), sections.tuned(results, path)]
    parts += [sections.ablations(found, results), sections.fixed_budget(found, results), sections.chunks(results, path)]
    parts += [sections.chunks_by_head(found, results), sections.by_head(path), [METHOD.read_text(encoding="utf-8").rstrip()]]
    parts += [tasks.details(path), details(results, texts), sections.equal_density(found, results)]
    parts += [sections.lengths(path), sections.attention(path)]
    for part in filter(None, parts):
        lines += ["", *part]
    text = "\n".join(lines).rstrip() + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print or write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="files of bench.fidelity.run to take over")
    parser.add_argument("--results", type=Path, default=measured.PATH)
    parser.add_argument("--markdown", action="store_true", help="write the report instead of printing it")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--pictures", action="store_true", help="draw the pictures of bench/results too, with --markdown")
    options = parser.parse_args(arguments)
    if options.add:
        for path, count in measured.add(options.add, options.results).items():
            print(f"{path}: {count} rows")
    text = report(measured.read(options.results), options.results)
    if options.markdown:
        options.out.write_text(text, encoding="utf-8")
        if options.pictures:
            results = measured.read(options.results)
            draw.draw_all(sections.all_measures(results, test_texts(results), options.results))
        print(options.out)
    else:
        print(text)


if __name__ == "__main__":
    main()
