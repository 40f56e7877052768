"""Options that several commands share, and their errors: one line on stderr and an exit code, instead of a traceback."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, get_type_hints

import typer

from flexmask.commands import MISSING, PROBLEM

if TYPE_CHECKING:
    from flexmask.settings import PrefillSettings, SettingsOverride

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a transformers model, or its name on the hub.")]
Prompt = Annotated[str, typer.Option("--prompt", "-p", metavar="FILE", help="Text file, UTF-8; '-' is stdin.")]
_FLAGS = ("method", "gamma", "min_budget", "dense_below")


class CommandError(Exception):
    """Ends a command with a message and the exit code `code`."""

    def __init__(self, message: str, code: int = PROBLEM) -> None:
        super().__init__(message)
        self.code = code


def usage_error(message: str, option: str | None = None) -> NoReturn:
    """Exit with the code for a wrong command line, naming the option."""
    raise typer.BadParameter(message, param_hint=None if option is None else f"'{option}'")


def missing_package(package: str, extra: str) -> CommandError:
    """The error for a missing optional package."""
    return CommandError(f"this command needs {package}: pip install 'flexmask[{extra}]'", MISSING)


@contextlib.contextmanager
def option_errors(*options: str, otherwise: str | None = None) -> Iterator[None]:
    """Turn the library's errors and unreadable files into errors of one of the `options`, or of `otherwise` unless it is None."""
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        from flexmask.method import UnknownOption

        # messages begin with the argument, as in ``gamma must be in (0, 1]; got 2``
        name = error.option if isinstance(error, UnknownOption) else str(error).partition(" ")[0].partition("[")[0]
        option = next((each for each in options if each == f"--{name.replace('_', '-')}"), otherwise)
        if option is None:
            raise
        message = (
            f"cannot read {error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        )
        usage_error(message, option)


class Common(NamedTuple):
    """The last options of every command; None where the command line has none."""

    device: Annotated[
        str | None, typer.Option(help="A torch device, or 'auto' for device_map='auto'. Default: cuda, else cpu.")
    ] = None
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16. Default: float32 on a CPU, else bfloat16.")] = (
        None
    )
    method: Annotated[
        str | None, typer.Option(help="How blocks are selected: hybrid (default), flexprefill (the paper's) or another method.")
    ] = None
    gamma: Annotated[
        float | None, typer.Option(help="In (0, 1]: higher keeps more blocks and loses less. Default of hybrid: 0.9.")
    ] = None
    min_budget: Annotated[
        int | None, typer.Option(help="Tokens' worth of blocks to keep at least. Default of hybrid: 256 per query block.")
    ] = None
    dense_below: Annotated[
        int | None, typer.Option(help="Prompts of fewer tokens run dense. Default: 16384. 0: no prompt does.")
    ] = None
    settings: Annotated[Path | None, typer.Option(metavar="FILE", help="A settings file, JSON; options override it.")] = None
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any other option or setting, as in --option block_size=64. Repeatable."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")] = False

    def settings_by_name(self) -> dict[str, Any]:
        """The settings of the command line: its flags, and its NAME=VALUE pairs, whose values are JSON or strings."""
        by_name = {name: getattr(self, name) for name in _FLAGS if getattr(self, name) is not None}
        for pair in self.option or ():
            name, equals, value = (part.strip() for part in pair.partition("="))
            if not equals or not name:
                usage_error(f"must be NAME=VALUE; got {pair!r}", "--option")
            if name in by_name:
                usage_error(f"{name} is given twice", "--option")
            with option_errors(otherwise="--option"):
                by_name[name] = _parsed(value)
        return by_name

    def prefill_settings(self, for_model: bool = True) -> SettingsOverride | None:
        """The file's settings with the options over them, or the options alone, by name; None: the model's own settings hold."""
        by_name = self.settings_by_name()
        if self.settings is None and not by_name:
            return None
        from flexmask.json_settings import keywords_of
        from flexmask.method import UnknownOption
        from flexmask.settings import PrefillSettings, apply_override

        file_settings = PrefillSettings()
        if self.settings is not None:
            with option_errors(otherwise="--settings"):
                file_settings = PrefillSettings.load(self.settings)
        with self.errors():
            keywords = keywords_of(by_name)
            try:
                merged = apply_override(file_settings, keywords, str(self.settings))
            except UnknownOption:
                # a model, which is read later, may have saved another method, which has this option
                if self.settings is None and for_model and "method" not in keywords:
                    return keywords
                raise
        return keywords if self.settings is None else merged

    def settings_of(self, config: Any, override: SettingsOverride | None) -> PrefillSettings:
        """Settings for a text model's config: `override`, else its own, else the defaults; checked for its layers and heads."""
        from flexmask.integrations.huggingface.model_config import settings_for

        with self.errors():
            settings = settings_for(config, override)
            settings.check_model(config)
            return settings

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """`option_errors` for settings, whose errors name a flag, --option or --settings, or without these the model."""
        flags = (f"--{name.replace('_', '-')}" for name in _FLAGS if getattr(self, name) is not None)
        return option_errors(*flags, otherwise="--option" if self.option else "--settings" if self.settings else "MODEL")


def with_common(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command whose first parameter is a `Common`: typer sees its fields as options, after the command's."""
    hints = get_type_hints(Common, include_extras=True)

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        command(Common(**{name: arguments.pop(name) for name in Common._fields}), **arguments)

    _, *parameters = inspect.signature(command, eval_str=True).parameters.values()
    shared = (
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=Common._field_defaults[name], annotation=hints[name])
        for name in Common._fields
    )
    run.__signature__ = inspect.Signature([*parameters, *shared])  # type: ignore[attr-defined]  # read by inspect
    return run


def _parsed(value: str) -> Any:
    """The value of a text: JSON, a number as Python writes it, or a string."""
    from flexmask.json_settings import json_data

    with contextlib.suppress(json.JSONDecodeError):
        return json_data(value)
    with contextlib.suppress(ValueError):
        return float(value)
    return value
