"""``flexmask doctor``: check this machine and a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexmask.commands import PROBLEM
from flexmask.commands.loading import chosen_device, chosen_dtype, load_config, tokenizer_problem
from flexmask.commands.options import Common, with_common
from flexmask.commands.output import Output

if TYPE_CHECKING:
    import torch

    from flexmask.environment import KnownIssue
    from flexmask.integrations.huggingface.layer_forecast import LayerForecast
    from flexmask.settings import SettingsOverride


@with_common
def doctor(
    common: Common,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Also forecast each layer of this model.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Prompt length to forecast the layers for.")] = 32768,
    report: Annotated[
        bool, typer.Option("--report", help="Also time attention, and print everything found to paste into an issue.")
    ] = False,
    skip_self_test: Annotated[
        bool, typer.Option("--skip-self-test", help="Run neither the self-test nor the check of FLASH.")
    ] = False,
) -> None:
    """Check this machine, and a model without its weights.

    Shows device, versions, backends and known problems. A self-test compares compiled sparse attention with dense attention under
    its mask, and masks with those of a CPU. Where FlexAttention's FLASH kernel can run, a check shows what it supports. With
    --report it also times attention, and prints everything to paste into an issue. With a MODEL it also forecasts each layer
    (sparse, dense or refused), from the model's config.

    Exits with 1 if the self-test fails, a problem stops attention, or the model is refused.
    """
    output = Output(common.as_json)
    with output.progress("loading torch"):
        from flexmask.environment import backends, device_name, known_issues, versions
    # 'auto' spreads a model over devices: its first layers are on the default one
    device = chosen_device(None if common.device == "auto" else common.device)
    dtype = chosen_dtype(common.dtype, device)
    override = common.prefill_settings(for_model=model is not None)
    config = None if model is None else load_config(model)
    package_versions = versions()
    issues = [*known_issues(device), *_transformers_issues(package_versions["transformers"], needed=model is not None)]
    document: dict[str, Any] = {
        "device": device_name(device),
        "versions": package_versions,
        "backends": [backend._asdict() for backend in backends(device, dtype)],
        "known_issues": [issue._asdict() for issue in issues],
    }
    _show_machine(output, document)
    has_problem = any(issue.severity == "error" for issue in issues)
    conclusion = "No problem found."
    if not skip_self_test:
        document |= _self_test(output, device)
        has_problem = has_problem or not all(test["passed"] for test in document["self_test"])
    if config is not None:
        with common.errors():
            refused, unknown, forecasts = _forecasts(config, override, tokens, device, dtype)
        model_facts = {"path": model, "type": type(config).__name__, "tokens": tokens, "refused": refused, "unknown": unknown}
        model_facts["tokenizer"] = tokenizer_problem(str(model), config)
        document["model"], document["layers"] = model_facts, [layer._asdict() for layer in forecasts]
        _show_layers(output, model_facts, forecasts)
        has_problem = has_problem or refused is not None or any(layer.outcome == "refused" for layer in forecasts)
        if unknown is not None:
            conclusion = "No problem found; the model's layers are unknown."
    if report:
        document |= _times(output, device)
    document["ok"] = not has_problem
    output.line("", "A problem was found." if has_problem else conclusion)
    if report:
        output.line("", "To paste into an issue:", "", "```", *_for_an_issue(document), "```")
    output.result(document)
    if has_problem:
        raise typer.Exit(PROBLEM)


def _transformers_issues(version: str | None, needed: bool) -> list[KnownIssue]:
    """Known issues of transformers by its version alone, because loading it takes seconds."""
    from flexmask.environment import KnownIssue, check_transformers

    severity = "error" if needed else "warning"
    if version is None:
        return [KnownIssue(severity, "transformers is missing: no Hugging Face models", "pip install 'flexmask[hf]'")]
    try:
        check_transformers(version)
    except ImportError as error:
        return [KnownIssue(severity, str(error), "pip install 'transformers>=4.54,<5.25'")]
    return []


def _self_test(output: Output, device: str) -> dict[str, Any]:
    """Run and show the self-test, and the check of FLASH's features where FLASH can run."""
    from flexmask.environment import flash_can_run, flash_features
    from flexmask.self_test import self_test

    with output.progress("self-test, which compiles attention: half a minute the first time (--skip-self-test: none)"):
        tests = list(self_test(device))
    rows = [
        [test.method, test.backend, test.dtype, _cell("{:.1%}", test.density), _cell("{:.1%}", test.other_blocks),
         _cell("{:.1e}", test.difference), f"{test.tolerance:g}", "passed" if test.passed else "FAILED", test.error]
        for test in tests
    ]  # fmt: skip
    columns = ["method", "backend", "dtype", "density", "other blocks", "largest difference", "allowed", "", ""]
    output.line()
    output.table(columns, rows, "Self-test: sparse attention against dense attention under its mask")
    features = []
    if flash_can_run(device):
        with output.progress("FLASH: compiling and checking"):
            features = flash_features(device)
        rows = [
            [report.feature, report.served, _cell("times {:.4g}", report.lse_factor), f"{report.seconds:.0f} s", report.reason]
            for report in features
        ]
        output.line()
        output.table(["", "served", "log-sum-exp", "", "why not"], rows, "FlexAttention's FLASH kernel, against float64")
    documents = [test._asdict() | {"passed": test.passed} for test in tests]
    return {"self_test": documents, "flash": [feature._asdict() for feature in features]}


def _cell(form: str, number: float | None) -> str:
    return "" if number is None else form.format(number)


def _times(output: Output, device: str) -> dict[str, Any]:
    """Measure and show the times of whole calls."""
    from flexmask.self_test import timed

    with output.progress("timing attention"):
        calls = list(timed(device))
    rows = []
    for call in calls:
        numbers = ["", "", "", ""]
        if call.dense is not None and call.sparse is not None:
            times = [f"{1e3 * seconds:.2f} ms" for seconds in (call.dense, call.sparse)]
            numbers = [f"{call.density:.1%}", *times, f"{call.dense / call.sparse:.2f}x"]
        rows.append([f"{call.tokens:,}", call.heads, call.dtype, *numbers, call.error])
    output.line()
    columns = ["tokens", "heads", "dtype", "density", "dense", "hybrid", "", ""]
    output.table(columns, rows, "Times of whole calls, with their masks")
    return {"times": [call._asdict() for call in calls]}


def _for_an_issue(document: dict[str, Any]) -> list[str]:
    """The lines of a document of `doctor`, to paste into an issue."""
    lines = [document["device"], " ".join(f"{name} {version}" for name, version in document["versions"].items() if version)]
    for name in ("backends", "known_issues", "self_test", "flash", "times"):
        for entry in document.get(name, ()):  # without a self-test some are absent
            facts = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                     for key, value in entry.items() if value not in ("", None))  # fmt: skip
            lines.append(f"{name}: {', '.join(facts)}")
    return lines


def _forecasts(
    config: Any, override: SettingsOverride | None, tokens: int, device: str, dtype: torch.dtype
) -> tuple[str | None, str | None, Sequence[LayerForecast]]:
    """Why the whole model is refused, or why its layers are unknown; else each layer's forecast."""
    try:
        from flexmask.integrations.huggingface.layer_forecast import layer_forecast
        from flexmask.integrations.huggingface.model_config import settings_for

        settings = settings_for(config.get_text_config(), override)
        return None, None, layer_forecast(config, settings=settings, tokens=tokens, device=device, dtype=dtype)
    except (ImportError, NotImplementedError) as error:
        return str(error), None, []
    except RuntimeError as error:
        return None, str(error), []


def _show_machine(output: Output, document: dict[str, Any]) -> None:
    versions = "  ".join(f"{name} {version or 'missing'}" for name, version in document["versions"].items())
    output.line(f"device  {document['device']}", versions, "")
    rows = [
        [backend["name"], "chosen by auto" if backend["chosen"] else "usable" if backend["usable"] else "no", backend["reason"]]
        for backend in document["backends"]
    ]
    output.table(["backend", "", "why not"], rows, "FlexAttention's backends")
    issues = [f"{issue['severity']}: {issue['what']}; {issue['remedy']}" for issue in document["known_issues"]]
    output.line("", *(issues or ["No known problem of this combination."]))


def _show_layers(output: Output, model: dict[str, Any], forecasts: Sequence[LayerForecast]) -> None:
    output.line()
    name = f"{model['path']} ({model['type']})"
    if model["refused"] is not None:
        output.line(f"{name} is refused: {model['refused']}")
    if model["unknown"] is not None:
        output.line(f"{model['unknown']}; run a short prompt under flexmask.sparse_prefill(model, dense_below=0) to see")
    if model["tokenizer"] is not None:
        output.line(f"warning: {model['tokenizer']}")
    rows = []
    # consecutive layers that differ in their number only
    for layer, group in groupby(forecasts, key=lambda layer: layer._replace(layer=0)):
        first, *others = [each.layer for each in group]
        layers = f"{first} to {others[-1]}" if others else str(first)
        rows.append(
            [layers, layer.outcome, layer.heads, layer.kv_heads, layer.head_dim, layer.window, layer.backend, layer.reason]
        )
    columns = ["layers", "prefill", "heads", "KV heads", "head_dim", "window", "backend", "why"]
    if rows:
        output.table(columns, rows, f"{name}, a prompt of {model['tokens']:,} tokens")
