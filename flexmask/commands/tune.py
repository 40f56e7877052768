"""``flexmask tune``: a gamma per head, from the user's own text."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from flexmask.commands.loading import load_model, prompt_ids, read_text
from flexmask.commands.options import Common, Model, Named, model_named, option_errors, usage_error, with_common
from flexmask.commands.output import Output


@with_common("gamma", "settings")
def tune(
    common: Common,
    text: Annotated[
        list[str], typer.Option("--text", "-t", metavar="FILE", help="A prompt to tune on; '-' is stdin. Repeatable.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Writes the settings here, as JSON.")],
    named: Named = None,
    model: Model = None,
    density: Annotated[float | None, typer.Option(help="Target in (0, 1]: share of the blocks to keep.")] = None,
    error: Annotated[
        float | None, typer.Option(help="Target >= 0 instead: relative squared error of head outputs, mean over heads.")
    ] = None,
    gradient: Annotated[
        bool, typer.Option("--gradient", help="Weigh errors by the gradient of the text's loss; needs the memory of training.")
    ] = False,
    tokens: Annotated[int | None, typer.Option(min=2, help="Cut each text to this many tokens.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue from the measurements next to --out, or start over.")
    ] = True,
) -> None:
    """Find a gamma per head on your own text.

    The target is a density or an error. One dense prefill per text compares every head's output at every gamma with the dense
    one. Measurements are saved to OUT.measured after each layer. An interrupted run continues from there. Another target on the
    same texts needs no new measurement.
    """
    output, name = Output(common.as_json), model_named(named, model)
    if (density is None) == (error is None):
        usage_error("give one of --density and --error", "--density")
    if out.is_dir() or not out.parent.is_dir():
        usage_error(f"{out} is a folder" if out.is_dir() else f"no folder {out.parent}", "--out")
    options = common.given()
    texts = [read_text(path, output, "--text") for path in text]
    loaded, tokenizer = load_model(name, output, common.device, common.dtype)
    from flexmask.integrations import huggingface

    prompts = [prompt_ids(loaded, tokenizer, content, tokens, option="--text") for content in texts]
    measured = out.with_name(out.name + ".measured")
    if out.is_file() and out.name == "config.json":
        usage_error("config.json is a model's; name another file", "--out")
    if not resume and measured.exists():
        # kept: an option may be wrong
        measured.replace(measured.with_name(measured.name + ".old"))
    flags = ("--density", "--error", "--method", "--min-budget", "--dense-below", "--resume")
    try:
        with (
            output.progress("measuring one text" if len(prompts) == 1 else f"measuring {len(prompts)} texts") as advance,
            option_errors(*flags, otherwise="--option" if common.option else None, input_ids="--text"),
        ):
            how: dict[str, Any] = {"density": density, "error": error, "gradient": gradient, **options}
            result = huggingface.tune(loaded, prompts, **how, resume=measured, progress=advance)
    except KeyboardInterrupt:
        output.remark(f"Measurements so far are in {measured}: the same command continues from there.")
        raise
    result.settings.save(out)
    about = {"model": name, "texts": text, "prompt_tokens": [prompt.shape[1] for prompt in prompts], "out": str(out)}
    document: dict[str, Any] = {
        **about,
        "gradient": gradient,
        "settings": result.settings.to_dict(),
        "density": result.density,
        "error": result.error,
        "uniform": [{"gamma": gamma, "density": density, "error": error} for gamma, density, error in result.uniform],
        "dense_layers": result.dense,
        "heads": result.rows(),
    }
    _show(output, document)
    output.result(document)


def _show(output: Output, document: dict[str, Any]) -> None:
    rows: list[list[Any]] = [
        [f"gamma {choice['gamma']:g} for all heads", choice["density"], choice["error"]] for choice in document["uniform"]
    ]
    rows.append(["gamma per head, tuned", document["density"], document["error"]])
    rows.sort(key=lambda row: -row[1])
    rows = [[name, f"{density:.1%}", error] for name, density, error in rows]
    what = "squared change of the loss that heads cause" if document["gradient"] else "relative squared error of head outputs"
    output.table(["settings", "density", "error"], rows, f"Density, and the {what}; means over heads")
    output.line()
    by_layer = []
    for layer, group in groupby(document["heads"], key=itemgetter("layer")):
        heads = list(group)
        gammas = sorted(head["gamma"] for head in heads)
        density, error = (sum(head[name] for head in heads) / len(heads) for name in ("density", "error"))
        by_layer.append([layer, gammas[0], gammas[len(gammas) // 2], gammas[-1], f"{density:.1%}", error])
    output.table(["layer", "lowest gamma", "median", "highest", "density", "error"], by_layer, "The tuned heads, by layer")
    for layer, reason in document["dense_layers"].items():
        output.line(f"layer {layer} stays dense: {reason}")
    output.line("", f"To use it: flexmask.sparse_prefill(model, settings={document['out']!r}), or --settings {document['out']}")
