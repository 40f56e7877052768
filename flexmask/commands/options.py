"""Options that several commands share: FlexPrefill's settings, and where to load a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexmask.commands.errors import option_errors, usage_error

if TYPE_CHECKING:
    from flexmask.integrations.settings import PrefillSettings

Model = Annotated[
    str, typer.Option("--model", "-m", metavar="PATH", help="Folder of a transformers model, or its name on the hub.")
]
Device = Annotated[str | None, typer.Option(help="As torch names it, or 'auto' for device_map='auto'. Default: cuda, else cpu.")]
DType = Annotated[str | None, typer.Option(help="float32, bfloat16, float16. Default: float32 on a CPU, else bfloat16.")]
Prompt = Annotated[str, typer.Option("--prompt", "-p", metavar="FILE", help="Text file, UTF-8; '-' is stdin.")]

Gamma = Annotated[float | None, typer.Option(help="Share of the attention mass that the kept blocks hold, in (0, 1].")]
Selection = Annotated[str | None, typer.Option(help="coverage, hybrid or reference.")]
DenseBelow = Annotated[int | None, typer.Option(help="Tokens: shorter prompts run dense. 0 never does.")]
Settings = Annotated[Path | None, typer.Option(metavar="FILE", help="Settings as JSON, as 'flexmask tune' writes them.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other setting, as in --set min_budget=512. Repeatable."),
]


def settings_from(settings: Path | None = None, overrides: list[str] | None = None, **options: Any) -> PrefillSettings | None:
    """The settings that the options of a command name; None where they name none: then the model's own hold.

    Options go before what the file `settings` holds. `options` that are None were not given.
    """
    chosen = {name: value for name, value in options.items() if value is not None} | parsed_overrides(overrides)
    from flexmask.integrations.settings import PrefillSettings

    saved: dict[str, Any] = {}
    if settings is not None:
        with option_errors(otherwise="--settings"):
            saved = PrefillSettings.load(settings).to_dict()
        for layer, of_layer in saved.get("layers", {}).items():
            again = next((name for name in chosen if name in of_layer), None)
            if again is not None:
                usage_error(f"{settings} sets {again} of layer {layer}, which one {again} cannot override", f"--{again}")
    if settings is None and not chosen:
        return None
    with option_errors("--gamma", "--selection", "--dense-below", otherwise="--set" if overrides else "--settings"):
        return PrefillSettings.from_dict({**saved, **chosen})


def parsed_overrides(overrides: list[str] | None) -> dict[str, Any]:
    """The settings of ``--set NAME=VALUE``; values are JSON, or words."""
    return dict(map(_parsed, overrides or ()))


def _parsed(override: str) -> tuple[str, Any]:
    name, given, value = override.partition("=")
    if not given or not name:
        usage_error(f"must be NAME=VALUE; got {override!r}", "--set")
    try:
        return name.strip(), json.loads(value)
    except json.JSONDecodeError:
        return name.strip(), value.strip()
