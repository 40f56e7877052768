"""``flexmask generate``: one prompt with dense and with sparse attention, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexmask.attention import RECOMMENDED
from flexmask.commands.errors import option_errors
from flexmask.commands.loading import load_config, load_model, read_text, remark_if_short, token_ids
from flexmask.commands.options import (
    DenseBelow,
    Device,
    DType,
    Gamma,
    Method,
    MinBudget,
    Model,
    Named,
    Option,
    Prompt,
    Settings,
    model_named,
    settings_from,
)
from flexmask.commands.output import Json, Output

if TYPE_CHECKING:
    from flexmask.integrations.huggingface.side_by_side import SideBySide


def generate(
    prompt: Prompt,
    named: Named = None,
    model: Model = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Timed prefills of each kind; the median counts.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    device: Device = None,
    dtype: DType = None,
    method: Method = None,
    gamma: Gamma = None,
    min_budget: MinBudget = None,
    dense_below: DenseBelow = None,
    settings: Settings = None,
    option: Option = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, dense and sparse, side by side.

    Compares new tokens, time to first token and density. Decoding is greedy. Each kind of attention first generates one token
    that is not timed, to compile.

    Without options the settings in the model's config.json apply, else the defaults.
    """
    output, name = Output(as_json), model_named(named, model)
    chosen = settings_from(settings, option, method=method, gamma=gamma, min_budget=min_budget, dense_below=dense_below)
    text = read_text(prompt)
    if chosen is not None:
        config = load_config(name)
        with option_errors(otherwise="--settings" if settings is not None and not option else "--option"):
            chosen.check_model(config.get_text_config())
    loaded, tokenizer = load_model(name, output, device, dtype)
    ids = token_ids(tokenizer, text, chat=chat)
    remark_if_short(output, loaded, chosen, ids.shape[1])
    from flexmask.integrations.huggingface.side_by_side import side_by_side

    with output.progress(f"generating from {ids.shape[1]:,} tokens") as advance:
        found = side_by_side(loaded, ids, settings=chosen, max_new_tokens=max_new_tokens, repeats=repeats, progress=advance)
    document = _document(found, tokenizer, name)
    _show(output, document, found.run.dense_summary())
    output.result(document)


def _document(found: SideBySide, tokenizer: Any, model: str) -> dict[str, Any]:
    ways = {
        name: {
            "first_token_seconds": each.seconds,
            "timed": list(each.first_token),
            "warm_up_seconds": each.warm_up,
            "tokens": list(each.tokens),
            "text": tokenizer.decode(each.tokens, skip_special_tokens=True),
        }
        for name, each in (("dense", found.dense), ("sparse", found.sparse))
    }
    return {
        "model": model,
        "prompt_tokens": found.prompt_tokens,
        "settings": found.run.settings.to_dict(),
        "density": found.density,
        "density_by_layer": {
            layer: sum(float(stats.density.mean()) for stats in calls) / len(calls)
            for layer, calls in sorted(found.run.stats.items())
        },
        "dense_layers": {layer: reasons[-1] for layer, reasons in sorted(found.run.reasons.items()) if reasons[-1] is not None},
        "same_tokens": found.same_tokens,
        "largest_logit_change": found.logit_difference,
        "largest_logit": found.largest_logit,
        **ways,
    }


def _show(output: Output, document: dict[str, Any], dense: tuple[bool, str] | None) -> None:
    settings = {"method": RECOMMENDED, **document["settings"]}
    options = ", ".join(f"{name} {value}" for name, value in settings.items() if name != "layers")
    by_layer = ", options by layer" if "layers" in settings else ""
    output.line(f"{document['model']}, {document['prompt_tokens']:,} tokens; {options}{by_layer}")
    output.line()
    ways = (document["dense"], document["sparse"])
    rows = [
        ["time to first token", *(f"{each['first_token_seconds']:.3f} s" for each in ways)],
        ["warm-up before it", *(f"{each['warm_up_seconds']:.3f} s" for each in ways)],
        ["blocks kept", "100%", f"{document['density']:.1%}"],
    ]
    output.table(["", "dense", "sparse"], rows)
    output.line()
    ratio = ways[0]["first_token_seconds"] / ways[1]["first_token_seconds"]
    output.line(
        f"First token {ratio:.2f} times as fast. Largest change of a logit: {document['largest_logit_change']:.3g}; largest "
        f"logit: {document['largest_logit']:.3g}."
    )
    if dense is not None:
        output.line(f"{dense[1]}")
    output.line()
    same, number = document["same_tokens"], max(len(each["tokens"]) for each in ways)
    output.line(f"dense   {ways[0]['text']!r}")
    output.line(f"sparse  {ways[1]['text']!r}")
    output.line("All new tokens are equal." if same == number else f"The first {same} of {number} new tokens are equal.")
