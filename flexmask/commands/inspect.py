"""``flexmask inspect``: what sparse prefill keeps of one prompt, as a page with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexmask.commands.loading import load_model, prompt_ids, read_text, remark_if_short
from flexmask.commands.options import Common, Model, Named, model_named, needs, option_errors, usage_error, with_common
from flexmask.commands.output import Output


@with_common
def inspect(
    common: Common,
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="FILE", help="Text file, UTF-8; '-' is stdin.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for report.html and inspection.json.")],
    named: Named = None,
    model: Model = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to show masks of, as in 0,5-7. Default: a few heads of all layers.")
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Heads to show in each of --layers, as in 0,3. Default: a few.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Cut the prompt to this many tokens.")] = None,
) -> None:
    """Write a report on one prompt.

    The report is one HTML page that loads nothing from elsewhere. It shows the density of every head and the attention that the
    masks hold by position. For a few heads it draws the mask over the true attention. 'flexmask gain --prompt' measures times.
    """
    output, name = Output(common.as_json), model_named(named, model)
    try:
        import matplotlib  # noqa: F401  # only to see that it is there
    except ImportError as error:
        raise needs("matplotlib", "plot") from error
    chosen = common.prefill_settings()
    layer_numbers, head_numbers = _numbers(layers, "--layers"), _numbers(heads, "--heads")
    if head_numbers is not None and layer_numbers is None:
        usage_error("must come with --layers", "--heads")
    text = read_text(prompt, output)
    if out.exists() and not out.is_dir():
        usage_error(f"{out} is not a folder", "--out")
    loaded, tokenizer = load_model(name, output, common.device, common.dtype)
    ids = prompt_ids(loaded, tokenizer, text, tokens)

    from flexmask.integrations.huggingface.model_config import settings_for
    from flexmask.integrations.inspect import inspect_prefill, write_report

    with common.errors("--model"):
        settings = settings_for(loaded.config.get_text_config(), chosen)
    remark_if_short(output, settings, ids.shape[1])
    with output.progress(f"two prefills of {ids.shape[1]:,} tokens") as advance, option_errors("--layers", "--heads"):
        inspection = inspect_prefill(loaded, ids, None, settings, layers=layer_numbers, heads=head_numbers, progress=advance)
    with output.progress("drawing"):
        page = write_report(inspection, out, model=name, prompt=tokenizer.decode(ids[0]))
    output.line(str(inspection.summary))
    for head in inspection.heads:
        output.line(f"layer {head.layer}, head {head.head} ({head.why}): {head.attention_kept:.1%} of its attention kept")
    if inspection.held:
        quarters = ", ".join(f"{share:.1%}" for share in inspection.held_by_quarter)
        output.line(f"attention held by quarter of the prompt, mean over layers and heads: {quarters}")
    if inspection.warning is not None:
        output.line(f"warning: {inspection.warning}")
    if not inspection.heads:
        which = "every layer" if layers is None else f"every layer of {layers}"
        output.remark(f"{which} ran dense: there are no masks to show")
    output.line(f"report: {page}")
    output.result({"report": str(page), **inspection.to_dict()})


def _numbers(text: str | None, option: str) -> list[int] | None:
    """The numbers in a list such as ``0,5-7``."""
    if text is None:
        return None
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            usage_error(f"must be numbers and ranges, as in 0,5-7; got {text!r}", option)
        numbers += range(int(first), int(last or first) + 1)
    if not numbers:
        usage_error(f"must name at least one; got {text!r}", option)
    return numbers
