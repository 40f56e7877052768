"""``flexmask gain``: the time that sparse prefill saves in a model on this machine, and its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from flexmask.commands.loading import chosen_device, chosen_dtype, load_config, load_model, prompt_ids, read_text
from flexmask.commands.options import Common, Model, Named, model_named, usage_error, with_common
from flexmask.commands.output import Output

Number = TypeVar("Number", int, float)
LEAST_GAIN = 1.05  # ratio of times to first token that counts as a gain
# default tokens
_LENGTHS, _LENGTHS_ON_CPUS = "32768,131072", "16384,32768"


@with_common
def gain(
    common: Common,
    named: Named = None,
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="FILE", help="Text to measure density and error on; needs weights.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=0, help="Also continue the prompt by so many tokens, dense and sparse.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    tokens: Annotated[str | None, typer.Option(help=f"Prompt lengths. Default: {_LENGTHS}; on a CPU {_LENGTHS_ON_CPUS}.")] = None,
    density: Annotated[str, typer.Option(help="Without a prompt: densities, the shares of the blocks to keep.")] = "0.1,0.2,0.4",
) -> None:
    """Measure what sparse prefill gains on this machine.

    Without a prompt it reads only the model's config.json. It times random queries and keys over random blocks at each --density.
    With --prompt it loads the weights. It measures density, error and times on the model's own queries and keys, and with
    --new-tokens shows both answers.
    """
    output, name = Output(common.as_json), model_named(named, model)
    if prompt is not None and tokens is not None:
        usage_error("give one of --prompt and --tokens", "--tokens")
    if prompt is None and (new_tokens or chat):
        usage_error("needs --prompt", "--new-tokens" if new_tokens else "--chat")
    where = chosen_device(common.device)
    if where == "auto":
        usage_error("times are of one device; got 'auto'", "--device")
    dtype, chosen = chosen_dtype(common.dtype, where), common.prefill_settings()
    if prompt is None:
        tokens = tokens or (_LENGTHS_ON_CPUS if where.startswith("cpu") else _LENGTHS)
        lengths = _numbers(tokens, int, "--tokens", "lengths of at least 2 tokens", 2)
        shares = _numbers(density, float, "--density", "shares in (0, 1]", 1e-9, 1.0)
        config = load_config(name, "MODEL")
        import torch

        from flexmask.commands.gain_model import of_config

        measured = of_config(config, chosen, lengths, shares, torch.zeros((), device=where, dtype=dtype), output)
    else:
        text = read_text(prompt, output)
        loaded, tokenizer = load_model(name, output, where, common.dtype, "MODEL")
        from flexmask.commands.gain_model import of_prompt

        ids = prompt_ids(loaded, tokenizer, text, chat=chat, new_tokens=new_tokens)
        measured = of_prompt(loaded, tokenizer, ids, chosen, new_tokens, output)
    document = {"model": name, **measured}
    document["gains"] = any(_gaining(row) for row in document["lengths"])
    document["verdict"] = [verdict(row) for row in document["lengths"]]
    _show(output, document)
    if document["gains"]:
        output.line("", to_use(chosen if isinstance(chosen, dict) else document["settings"], common.settings, chosen is None))
    output.result(document)


def _gaining(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The ways that gain in every round."""
    return [way for way in row["sparse"] if way["first_token_ratios"][0] >= LEAST_GAIN]


def verdict(row: dict[str, Any]) -> str:
    start = f"{row['tokens']:,} tokens: "
    if not row["sparse"]:
        reason = max(row["reasons"], key=lambda reason: row["reasons"][reason], default="no layer runs sparse")
        return f"{start}nothing to gain; {reason}"
    worth = _gaining(row)
    if worth:
        least, most = (f(way["first_token_ratio"] for way in worth) for f in (min, max))
        times = f"{most:.2f}" if len(worth) == 1 else f"{least:.2f} to {most:.2f}"
        return f"{start}the first token comes {times} times as fast at density {_percents(worth)}"
    unclear = [way for way in row["sparse"] if way["first_token_ratios"][1] >= LEAST_GAIN]
    if unclear:
        ratios = [ratio for way in unclear for ratio in way["first_token_ratios"]]
        times = f"{min(ratios):.2f} to {max(ratios):.2f} times as fast at density {_percents(unclear)}"
        return f"{start}no verdict; the first token comes {times}, from run to run. Repeat it on a quiet machine"
    return f"{start}nothing to gain; the first token comes less than 5% sooner at density {_percents(row['sparse'])}"


def _percents(ways: Sequence[dict[str, Any]]) -> str:
    shares = sorted(way["density"] for way in ways)
    return f"{shares[0]:.0%}" if len(shares) == 1 else f"{shares[0]:.0%} to {shares[-1]:.0%}"


def _show(output: Output, document: dict[str, Any]) -> None:
    about = f"{document['model']} ({document['type']}), method {document['settings']['method']}"
    output.line(f"{about}, {document['dtype']}, torch {document['torch']}", f"on {document['device']}")
    timed, error, answers = [row for row in document["lengths"] if row["sparse"]], document.get("error"), document.get("answers")
    if timed:
        output.line()
        _show_times(output, timed)
        output.line("", *_notes(document, timed))
    if error is not None:
        change = f"|Δ log p| {error['log_prob_change']:.3f}, loss {error['loss_dense']:.3f} -> {error['loss_sparse']:.3f}"
        more = error["loss_sparse"] - error["loss_dense"]
        output.line("", f"Error on this prompt, over {error['tokens']:,} tokens: {change} ({more:+.3f})")
    if answers:
        output.line("", *_compared(answers["dense"], answers["sparse"]))
    if document.get("low_heads"):
        output.line(f"warning: {document['low_heads']}")
    output.line("", *document["verdict"])


def _show_times(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    lines: list[list[Any]] = []
    for row in rows:
        dense = row["dense"]
        times = (_time(dense["attention_seconds"]), _time(dense["first_token_seconds"]))
        lines.append([f"{row['tokens']:,}", f"dense, {dense['kernel']}", "100%", "", times[0], "", times[1], "", ""])
        for way in row["sparse"]:
            parts = [_time(way["selection_seconds"]), _time(way["attention_seconds"]), f"{way['attention_ratio']:.2f}x"]
            ratios = " to ".join(f"{ratio:.2f}" for ratio in way["first_token_ratios"])
            first = [_time(way["first_token_seconds"]), f"{way['first_token_ratio']:.2f}x", ratios]
            lines.append(["", "flexmask", f"{way['density']:.1%}", *parts, *first])
    names = "tokens, attention by, density, selection, attention, faster, first token, sooner, from run to run"
    output.table(names.split(", "), lines, "Seconds of all attention layers, and the expected time to first token")


def _compared(dense: dict[str, Any], sparse: dict[str, Any]) -> list[str]:
    """Both answers, and where they part."""
    number = max(len(dense["tokens"]), len(sparse["tokens"]))
    pairs = zip_longest(dense["tokens"], sparse["tokens"])
    same = next((at for at, (left, right) in enumerate(pairs) if left != right), number)
    said = "All new tokens are equal." if same == number else f"The first {same} of {number} new tokens are equal."
    return [f"dense   {dense['text']!r}", f"sparse  {sparse['text']!r}", said]


def _notes(document: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    layers = " and ".join(f"{number} {kind}" for kind, number in rows[-1]["layers"].items())
    if document["source"] == "prompt":
        notes = [f"Attention: {layers} layers, their own queries and keys."]
        notes.append("First token: attention, and the rest of the model as it ran on this prompt.")
    else:
        weights, speed = _short(document["weights_per_token"]), _short(document["matmul_flops_per_second"], " ")
        rest = f"{weights} weights at 2 FLOPs per token and the {speed}FLOP/s of a matmul measured here"
        notes = [f"Attention: {layers} layers, random queries and keys, random blocks."]
        notes.append(f"First token (an estimate): attention, and {rest}.")
        notes.append("Your text decides the density: --prompt FILE measures it, and the error, with the model's weights.")
    notes.append("Times are medians of three runs of each, in turns.")
    share = min(row.get("timed_share_of_heads", 1.0) for row in rows)
    layers_timed = min(row.get("timed_share_of_layers", 1.0) for row in rows)
    if layers_timed < 1:
        notes.append(f"A CPU would need long: {layers_timed:.0%} of the layers were timed, and the seconds scaled up.")
    if share < 1:
        notes.append(f"Dense attention is slow here: {share:.0%} of the heads were timed, and the seconds scaled up.")
    return notes


def to_use(settings: dict[str, Any], file: Path | None, of_config: bool) -> str:
    """A line of Python that switches it on, with settings from a `file`, the model's config or options."""
    from flexmask.attention import RECOMMENDED

    options = {name: value for name, value in settings.items() if (name, value) != ("method", RECOMMENDED)}
    given = "" if of_config else "".join(f", {name}={value!r}" for name, value in options.items())
    if file is not None and "layers" in options:
        given = f", settings={str(file)!r}"
    return f"To use it: with flexmask.sparse_prefill(model{given}): model.generate(**inputs)"


def _short(number: float, space: str = "") -> str:
    """A number with a unit: 3.67M, 612T."""
    unit, sign = next(((unit, sign) for unit, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if number >= unit), (1.0, ""))
    return f"{number / unit:.3g}{space}{sign}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


def _numbers(
    text: str, kind: Callable[[str], Number], option: str, expected: str, least: float, most: float = math.inf
) -> list[Number]:
    """The numbers in a list such as ``0.1,0.4``."""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        usage_error(f"must be numbers, as in 1,2; got {text!r}", option)
    if not all(least <= number <= most for number in numbers):
        usage_error(f"must be {expected}; got {text!r}", option)
    return numbers
