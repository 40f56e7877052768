"""``flexmask tune``: a gamma for every head, from the user's own text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexmask.commands.errors import option_errors, usage_error
from flexmask.commands.loading import load_model, read_text, token_ids
from flexmask.commands.options import DenseBelow, Device, DType, Model, Set, parsed_overrides
from flexmask.commands.output import Json, Output

if TYPE_CHECKING:
    from flexmask.integrations.tune_result import TuneResult


def tune(
    model: Model,
    text: Annotated[
        list[str], typer.Option("--text", "-t", metavar="FILE", help="A prompt to tune on; '-' is stdin. Repeatable.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the settings go, as JSON.")],
    density: Annotated[float | None, typer.Option(help="Target in (0, 1]: share of the visible blocks to keep.")] = None,
    error: Annotated[
        float | None, typer.Option(help="Target >= 0 instead: relative squared error of a head's output, mean over heads.")
    ] = None,
    selection: Annotated[str, typer.Option(help="hybrid or coverage.")] = "hybrid",
    gradient: Annotated[
        bool, typer.Option("--gradient", help="Weigh errors by the gradient of the text's loss: takes the memory of training.")
    ] = False,
    tokens: Annotated[int | None, typer.Option(min=2, help="Read only the first so many tokens of each text.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the measurements next to --out, or start over.")
    ] = True,
    device: Device = None,
    dtype: DType = None,
    dense_below: DenseBelow = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Find a gamma for every head on your own text.

    The target is a density or an error. One dense prefill a text, with every head's output compared at every gamma. Measurements
    are written after each layer to OUT.measured: an interrupted run goes on from there, and another target on the same texts
    takes no new measurement.
    """
    output = Output(as_json)
    if (density is None) == (error is None):
        usage_error("give one of --density and --error", "--density")
    if out.is_dir() or not out.parent.is_dir():
        usage_error(f"{out} is a folder" if out.is_dir() else f"no folder {out.parent}", "--out")
    options = parsed_overrides(overrides) | ({} if dense_below is None else {"dense_below": dense_below})
    texts = [read_text(path, "--text") for path in text]
    loaded, tokenizer = load_model(model, output, device, dtype)
    from flexmask.integrations.tune import tune as run

    prompts = [token_ids(tokenizer, each, tokens) for each in texts]
    measured = out.with_name(out.name + ".measured")
    if out.is_file() and out.name == "config.json":
        usage_error("config.json is a model's; name another file", "--out")
    if not resume and measured.exists():
        # until the new one is complete, in case of an option that is wrong
        measured.replace(measured.with_name(measured.name + ".old"))
    own = ("--density", "--error", "--selection", "--dense-below", "--resume")
    try:
        with (
            output.progress(f"measuring {len(prompts)} texts") as advance,
            option_errors(*own, otherwise="--set" if overrides else None, input_ids="--text"),
        ):
            how: dict[str, Any] = {"density": density, "error": error, "selection": selection, "gradient": gradient, **options}
            result = run(loaded, prompts, **how, resume=measured, progress=advance)
    except KeyboardInterrupt:
        output.remark(f"What was measured is in {measured}: the same command goes on from there.")
        raise
    result.settings.save(out)
    document: dict[str, Any] = {
        "model": model,
        "texts": text,
        "prompt_tokens": [each.shape[1] for each in prompts],
        "out": str(out),
    }
    document |= {"gradient": gradient, **_document(result)}
    _show(output, document)
    output.result(document)


def _document(result: TuneResult) -> dict[str, Any]:
    return {
        "settings": result.settings.to_dict(),
        "density": result.density,
        "error": result.error,
        "uniform": [{"gamma": gamma, "density": density, "error": error} for gamma, density, error in result.uniform],
        "dense_layers": result.dense,
        "heads": result.rows(),
    }


def _show(output: Output, document: dict[str, Any]) -> None:
    rows: list[list[Any]] = [
        [f"gamma {each['gamma']:g} in every head", each["density"], each["error"]] for each in document["uniform"]
    ]
    rows.append(["tuned by head", document["density"], document["error"]])
    rows.sort(key=lambda row: -row[1])
    what = "squared change of the loss that they cause" if document["gradient"] else "relative squared error of their output"
    output.table(["settings", "density", "error"], rows, f"What the heads keep, and the {what}")
    output.line()
    layers: dict[int, list[dict[str, Any]]] = {}
    for row in document["heads"]:
        layers.setdefault(row["layer"], []).append(row)
    by_layer = []
    for layer, heads in layers.items():
        gammas = sorted(head["gamma"] for head in heads)
        means = (sum(head[name] for head in heads) / len(heads) for name in ("density", "error"))
        by_layer.append([layer, gammas[0], gammas[len(gammas) // 2], gammas[-1], *means])
    columns = ["layer", "lowest gamma", "median", "highest", "density", "error"]
    output.table(columns, by_layer, "The tuned heads, by layer")
    for layer, reason in document["dense_layers"].items():
        output.line(f"layer {layer} stays dense: {reason}")
    output.line()
    output.line(f"{document['out']}: flexprefill(model, config={document['out']!r}), or --settings {document['out']}")
