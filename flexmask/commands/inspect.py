"""``flexmask inspect``: the blocks that sparse prefill keeps of one prompt, as a page with pictures."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from flexmask.commands.loading import load_model, prompt_ids, read_text, remark_if_short
from flexmask.commands.options import Common, Model, Prompt, missing_package, option_errors, usage_error, with_common
from flexmask.commands.output import Output


@with_common
def inspect(
    common: Common,
    model: Model,
    prompt: Prompt,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write, as report.html.")],
    heads: Annotated[
        str | None, typer.Option(help="Heads to show masks of, LAYER:HEAD, as in 0:3,5:1. Default: a few by density.")
    ] = None,
) -> None:
    """Write a report on one prompt.

    The report is one HTML page that loads nothing from elsewhere. It shows the density of every head and the attention that the
    masks hold by position. For a few heads it draws the mask over the true attention. 'flexmask gain' measures times.
    """
    output = Output(common.as_json)
    try:
        import matplotlib  # noqa: F401  # only to see that it is there
    except ImportError as error:
        raise missing_package("matplotlib", "plot") from error
    override = common.prefill_settings()
    if heads is not None and not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", heads):
        usage_error(f"must be LAYER:HEAD pairs, as in 0:3,5:1; got {heads!r}", "--heads")
    pairs = None if heads is None else [(int(layer), int(head)) for layer, head in re.findall(r"(\d+):(\d+)", heads)]
    text = read_text(prompt, output)
    if out.is_dir():
        usage_error(f"{out} is a folder", "--out")
    # refuse a page that cannot be written before the long wait
    nearest = next(folder for folder in out.absolute().parents if folder.exists())
    if not nearest.is_dir() or not os.access(out if out.exists() else nearest, os.W_OK):
        usage_error(f"cannot write {out}", "--out")
    loaded_model, tokenizer = load_model(model, output, common.device, common.dtype)
    ids = prompt_ids(loaded_model, tokenizer, text)

    from flexmask.commands.gain_model import layer_progress
    from flexmask.integrations.inspect import inspect_prefill, write_report

    settings = common.settings_of(loaded_model.config.get_text_config(), override)
    remark_if_short(output, settings, ids.shape[1])
    progress_text = f"two prefills of {ids.shape[1]:,} tokens"
    with output.progress(progress_text) as advance, layer_progress(loaded_model, 2, advance), option_errors("--heads"):
        inspection = inspect_prefill(loaded_model, ids, None, settings, heads=pairs)
    with output.progress("drawing"):
        page = write_report(inspection, out, model=model, prompt=tokenizer.decode(ids[0]))
    output.line(str(inspection.run.summary()))
    for head in inspection.heads:
        output.line(f"layer {head.layer}, head {head.head} ({head.why}): {head.attention_kept:.1%} of its attention kept")
    if not inspection.heads:
        output.remark("every layer ran dense: there are no masks to show")
    output.line(f"report: {page}")
    output.result({"report": str(page), **inspection.to_dict()})
