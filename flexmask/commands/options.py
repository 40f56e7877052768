"""Options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexmask.commands.errors import option_errors, usage_error

if TYPE_CHECKING:
    from flexmask.settings import PrefillSettings

_MODEL = "Folder of a transformers model, or its name on the hub."
Named = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)]
Model = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help="The same, as an option.")]
Device = Annotated[str | None, typer.Option(help="A torch device, or 'auto' for device_map='auto'. Default: cuda, else cpu.")]
DType = Annotated[str | None, typer.Option(help="float32, bfloat16, float16. Default: float32 on a CPU, else bfloat16.")]
Prompt = Annotated[str, typer.Option("--prompt", "-p", metavar="FILE", help="Text file, UTF-8; '-' is stdin.")]

Method = Annotated[
    str | None, typer.Option(help="How blocks are selected: hybrid (default), flexprefill (the paper's) or another method.")
]
Gamma = Annotated[float | None, typer.Option(help="In (0, 1]: higher keeps more blocks and loses less. Default of hybrid: 0.9.")]
MinBudget = Annotated[
    int | None,
    typer.Option("--min-budget", help="Tokens' worth of blocks to keep at least. Default of hybrid: 256 per query block."),
]
Option = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="Any other option or setting, as in --option block_size=64. Repeatable."),
]
DenseBelow = Annotated[int | None, typer.Option(help="Prompts of fewer tokens run dense. Default: 16384. 0: no prompt does.")]
Settings = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Settings as JSON, as 'flexmask tune' writes them; options override them.")
]


def model_named(named: str | None, model: str | None) -> str:
    """The model of a command, which takes it as its argument or as --model."""
    if named is not None and model is not None:
        usage_error("give the model once", "--model")
    chosen = model if named is None else named
    if chosen is None:
        usage_error("give a model: its folder, or its name on the hub", "MODEL")
    return chosen


def settings_from(settings: Path | None = None, others: list[str] | None = None, **options: Any) -> PrefillSettings | None:
    """The settings that a command's options name; None if they name none: then the model's own hold.

    Options override those of the file `settings`. `options` that are None were not given; `others` are NAME=VALUE.
    """
    chosen = given_options(others, **options)
    if settings is None and not chosen:
        return None
    from flexmask.settings import PrefillSettings

    saved: dict[str, Any] = {}
    if settings is not None:
        with option_errors(otherwise="--settings"):
            saved = PrefillSettings.load(settings).to_dict()
        for layer, of_layer in saved.get("layers", {}).items():
            again = next((name for name in chosen if name in of_layer), None)
            if again is not None:
                usage_error(f"{settings} sets {again} of layer {layer}, which one {again} cannot override", f"--{again}")
    # a flag that was not given is not to blame
    flags = (f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None)
    with option_errors(*flags, otherwise="--option" if others else "--settings"):
        try:
            return PrefillSettings.from_dict({**saved, **chosen})
        except ValueError as error:
            # without the message's source: the option replaces it
            raise error.__cause__ or error from None


def given_options(others: list[str] | None = None, **options: Any) -> dict[str, Any]:
    """The options that are not None, and NAME=VALUE pairs, whose values are JSON or words."""
    given_by_name = {name: value for name, value in options.items() if value is not None}
    for pair in others or ():
        name, given, value = (part.strip() for part in pair.partition("="))
        if not given or not name:
            usage_error(f"must be NAME=VALUE; got {pair!r}", "--option")
        if name in given_by_name:
            usage_error(f"{name} is given twice", "--option")
        given_by_name[name] = _parsed(value)
    return given_by_name


def _parsed(value: str) -> Any:
    """JSON, a number that JSON would write otherwise, or a word."""
    for parse in (json.loads, float):
        try:
            return parse(value)
        except ValueError:
            pass
    return value
