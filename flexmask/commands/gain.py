"""``flexmask gain``: the time that sparse prefill saves in a model on this machine, and its cost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from flexmask.commands.errors import option_errors, usage_error
from flexmask.commands.loading import chosen_device, chosen_dtype, load_config, load_model, read_text, remark_if_short, token_ids
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
    Settings,
    model_named,
    settings_from,
)
from flexmask.commands.output import Json, Output

if TYPE_CHECKING:
    import torch

    from flexmask.settings import PrefillSettings

Number = TypeVar("Number", int, float)
# ratio of times to first token that counts as a gain
LEAST_GAIN = 1.05
# largest over smallest seconds of the same work, from which the machine is called busy
WIDE = 1.3
# default tokens
_LENGTHS, _LENGTHS_ON_CPUS = "32768,131072", "16384,32768"


def gain(
    named: Named = None,
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="FILE", help="Text to measure density and error on; needs weights.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=0, help="Also continue the prompt by so many tokens, dense and sparse.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    tokens: Annotated[str | None, typer.Option(help=f"Prompt lengths. Default: {_LENGTHS}; on a CPU {_LENGTHS_ON_CPUS}.")] = None,
    density: Annotated[str, typer.Option(help="Without a prompt: shares of the blocks to keep.")] = "0.1,0.2,0.4",
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
    """Measure what sparse prefill gains on this machine.

    Without a prompt it reads only the model's config.json. It times random queries and keys over random blocks at each --density.
    With --prompt it loads the weights. It measures density, error and times on the model's own queries and keys, and with
    --new-tokens shows both answers.
    """
    output, name = Output(as_json), model_named(named, model)
    if prompt is not None and tokens is not None:
        usage_error("give one of --prompt and --tokens", "--tokens")
    if prompt is None and (new_tokens or chat):
        usage_error("needs --prompt", "--new-tokens" if new_tokens else "--chat")
    import torch

    where = chosen_device(device)
    if where == "auto":
        usage_error("times are of one device; got 'auto'", "--device")
    kind = chosen_dtype(dtype, where)
    chosen = settings_from(settings, option, method=method, gamma=gamma, min_budget=min_budget, dense_below=dense_below)
    on = torch.device(where)
    if prompt is None:
        lengths = _lengths(tokens or (_LENGTHS_ON_CPUS if on.type == "cpu" else _LENGTHS))
        document = _of_config(output, name, chosen, lengths, _densities(density), on, kind)
    else:
        document = _of_prompt(output, name, chosen, read_text(prompt), on, kind, new_tokens, chat)
    own = chosen is None and len(document["settings"]) > 1
    document["settings_from"] = "config.json" if own else str(settings or "options")
    document["gains"] = any(_gaining(each) for each in document["lengths"])
    document["verdict"] = [verdict(each) for each in document["lengths"]]
    _show(output, document)
    output.result(document)


def _of_config(
    output: Output,
    model: str,
    chosen: PrefillSettings | None,
    lengths: Sequence[int],
    densities: Sequence[float],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    config = load_config(model, "MODEL")
    from flexmask.commands.gain_model import row_of, settings_of, weights_per_token
    from flexmask.commands.gain_times import matmul_speed, model_times
    from flexmask.integrations.huggingface.layer_plan import layer_plan

    text = config.get_text_config()
    longest, rows = getattr(text, "max_position_embeddings", None), []
    if longest is not None and max(lengths) > longest:
        output.remark(f"{max(lengths):,} tokens exceed the model's max_position_embeddings, {longest:,}")
    with output.progress("timing one length" if len(lengths) == 1 else f"timing {len(lengths)} lengths") as advance:
        advance(0, len(lengths))
        with option_errors(otherwise="--option"):
            used = settings_of(config, chosen)
        speed, weights = matmul_speed(max(lengths), text.hidden_size, device, dtype), weights_per_token(config)
        for length in lengths:
            plan = layer_plan(config, settings=used, tokens=length, device=device, dtype=dtype)
            row = row_of(length, (each.plan for each in plan), (each.reason for each in plan), 2 * weights * length / speed)
            if row["layers"].get("sparse", 0):
                times = model_times(plan, length, densities, used.selector(), used.run_options, speed, device, dtype)
                row = _with_first_tokens(row | times)
            rows.append(row)
            advance(len(rows), len(lengths))
    return {
        **_about(model, type(config).__name__, used, device, dtype),
        "source": "random blocks",
        "matmul_flops_per_second": speed,
        "weights_per_token": weights,
        "lengths": rows,
    }


def _of_prompt(
    output: Output,
    model: str,
    chosen: PrefillSettings | None,
    text: str,
    device: torch.device,
    dtype: torch.dtype,
    new_tokens: int,
    chat: bool,
) -> dict[str, Any]:
    loaded, tokenizer = load_model(model, output, str(device), str(dtype).removeprefix("torch."), "MODEL")
    from flexmask.commands.gain_model import answers, prompt_gain, settings_of

    ids = token_ids(tokenizer, text, chat=chat)
    with option_errors(otherwise="--option"):
        used = settings_of(loaded.config, chosen)
    remark_if_short(output, loaded, used, ids.shape[1])
    with output.progress(f"three prefills of {ids.shape[1]:,} tokens") as advance:
        row, error = prompt_gain(loaded, ids, used, advance)
    found = {}
    if new_tokens:
        with output.progress(f"two answers of {new_tokens:,} tokens"):
            found = answers(loaded, ids, used, new_tokens)
    return {
        **_about(model, type(loaded.config).__name__, used, device, dtype),
        "source": "prompt",
        "lengths": [_with_first_tokens(row) if row["sparse"] else row],
        "error": error,
        "answers": {
            name: {"tokens": own, "text": tokenizer.decode(own, skip_special_tokens=True)} for name, own in found.items()
        },
    }


def _about(model: str, name: str, settings: PrefillSettings, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    import torch

    from flexmask.environment import device_name

    return {
        "model": model,
        "type": name,
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "settings": {"method": settings.method, **settings.to_dict()},
    }


def _with_first_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """The row with medians of the rounds, and the expected time to first token: attention, selection and the rest of the model.

    ``by_round`` keeps the seconds of every round, `first_token_ratios` the smallest and largest ratio of one round.
    """
    rest, dense = row["rest_seconds"], _median_of_rounds(row["dense"])
    sparse = [_median_of_rounds(way) for way in row["sparse"]]
    dense["first_token_seconds"] = rest + dense["attention_seconds"]
    for way in sparse:
        taken = way["selection_seconds"] + way["attention_seconds"]
        way["first_token_seconds"] = rest + taken
        way["attention_ratio"] = dense["attention_seconds"] / taken
        way["first_token_ratio"] = dense["first_token_seconds"] / way["first_token_seconds"]
        rounds = zip(dense["by_round"]["attention_seconds"], *way["by_round"].values(), strict=True)
        ratios = [(rest + whole) / (rest + sum(parts)) for whole, *parts in rounds]
        way["first_token_ratios"] = [min(ratios), max(ratios)]
    return row | {"dense": dense, "sparse": sparse}


def _median_of_rounds(way: dict[str, Any]) -> dict[str, Any]:
    by_round = {name: seconds for name, seconds in way.items() if name.endswith("_seconds")}
    return way | {name: statistics.median(seconds) for name, seconds in by_round.items()} | {"by_round": by_round}


def spread(row: dict[str, Any]) -> float:
    """Largest over smallest seconds of the same work in the rounds of a row, of what takes a tenth of dense attention or more."""
    ways = [way["by_round"] for way in (row["dense"], *row["sparse"])]
    least = row["dense"]["attention_seconds"] / 10
    timed = [seconds for way in ways for seconds in way.values() if statistics.median(seconds) >= least]
    return max((max(each) / min(each) for each in timed if min(each) > 0), default=1.0)


def _gaining(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The ways that gain in every round."""
    return [each for each in row["sparse"] if each["first_token_ratios"][0] >= LEAST_GAIN]


def verdict(row: dict[str, Any]) -> str:
    start = f"{row['tokens']:,} tokens: "
    if not row["sparse"]:
        reason = max(row["reasons"], key=lambda each: row["reasons"][each], default="no layer runs sparse")
        return f"{start}nothing to gain; {reason}"
    worth = _gaining(row)
    if worth:
        least, most = (f(each["first_token_ratio"] for each in worth) for f in (min, max))
        times = f"{most:.2f}" if len(worth) == 1 else f"{least:.2f} to {most:.2f}"
        return f"{start}the first token comes {times} times as fast at {_percents(worth)} of the blocks"
    unclear = [each for each in row["sparse"] if each["first_token_ratios"][1] >= LEAST_GAIN]
    if unclear:
        ratios = [ratio for each in unclear for ratio in each["first_token_ratios"]]
        times = f"{min(ratios):.2f} to {max(ratios):.2f} times as fast at {_percents(unclear)} of the blocks"
        return f"{start}no verdict; the first token comes {times}, from run to run. Repeat it on a quiet machine"
    return f"{start}nothing to gain; the first token comes less than 5% sooner at {_percents(row['sparse'])} of the blocks"


def _percents(ways: Sequence[dict[str, Any]]) -> str:
    shares = sorted(each["density"] for each in ways)
    return f"{shares[0]:.0%}" if len(shares) == 1 else f"{shares[0]:.0%} to {shares[-1]:.0%}"


def _show(output: Output, document: dict[str, Any]) -> None:
    rows, error = document["lengths"], document.get("error")
    method = document["settings"]["method"]
    output.line(f"{document['model']} ({document['type']}), method {method}, {document['dtype']}, torch {document['torch']}")
    output.line(f"on {document['device']}")
    timed = [row for row in rows if row["sparse"]]
    if timed:
        output.line()
        _show_times(output, timed)
        output.line()
        for line in _notes(document, timed):
            output.line(line)
    if error is not None:
        output.line()
        output.line(
            f"Error on this prompt, over {error['tokens']:,} tokens: |Δ log p| {error['log_prob_change']:.3f}, "
            f"loss {error['loss_dense']:.3f} -> {error['loss_sparse']:.3f} ({error['loss_sparse'] - error['loss_dense']:+.3f})"
        )
    both = document.get("answers")
    if both:
        output.line()
        for line in _compared(both["dense"], both["sparse"]):
            output.line(line)
    for row in rows:
        if row.get("low_heads"):
            output.line(f"warning: {row['low_heads']}")
    output.line()
    for line in document["verdict"]:
        output.line(line)
    if document["gains"]:
        output.line()
        for line in paste(document["settings"], document["settings_from"]):
            output.line(line)


def _show_times(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    lines: list[list[Any]] = []
    for row in rows:
        dense = row["dense"]
        times = (_time(dense["attention_seconds"]), _time(dense["first_token_seconds"]))
        lines.append([f"{row['tokens']:,}", f"dense, {dense['kernel']}", "100%", "", times[0], "", times[1], "", ""])
        for way in row["sparse"]:
            parts = [_time(way["selection_seconds"]), _time(way["attention_seconds"]), f"{way['attention_ratio']:.2f}x"]
            ratios = " to ".join(f"{each:.2f}" for each in way["first_token_ratios"])
            first = [_time(way["first_token_seconds"]), f"{way['first_token_ratio']:.2f}x", ratios]
            lines.append(["", "flexmask", f"{way['density']:.1%}", *parts, *first])
    names = "tokens, attention by, blocks kept, selection, attention, faster, first token, sooner, from run to run"
    output.table(names.split(", "), lines, "Seconds of all attention layers, and the expected time to first token")


def _compared(dense: dict[str, Any], sparse: dict[str, Any]) -> list[str]:
    """Both answers, and where they part."""
    number = max(len(dense["tokens"]), len(sparse["tokens"]))
    pairs = zip_longest(dense["tokens"], sparse["tokens"])
    same = next((at for at, (left, right) in enumerate(pairs) if left != right), number)
    said = "All new tokens are equal." if same == number else f"The first {same} of {number} new tokens are equal."
    return [f"dense   {dense['text']!r}", f"sparse  {sparse['text']!r}", said]


def _notes(document: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    of_prompt = document["source"] == "prompt"
    layers = " and ".join(f"{number} {kind}" for kind, number in rows[-1]["layers"].items())
    if of_prompt:
        notes = [f"Attention: {layers} layers, their own queries and keys."]
        notes.append("First token: attention, and the rest of the model as it ran on this prompt.")
    else:
        weights, speed = _short(document["weights_per_token"]), _short(document["matmul_flops_per_second"], " ")
        notes = [f"Attention: {layers} layers, random queries and keys, random blocks."]
        notes.append(
            f"First token (an estimate): attention, and {weights} weights at 2 FLOPs per token and the {speed}FLOP/s of a matmul "
            "measured here."
        )
        notes.append("Your text decides the density: --prompt FILE measures it, and the error, with the model's weights.")
    notes.append("Times are medians of three runs of each, in turns.")
    widest = max(spread(row) for row in rows)
    if widest >= WIDE:
        notes.append(f"warning: the same work took up to {widest:.1f} times as long from run to run; is the machine busy?")
    share = min(row.get("timed_share_of_heads", 1.0) for row in rows)
    if share < 1:
        notes.append(f"Dense attention is slow here: {share:.0%} of the heads were timed, and the seconds scaled up.")
    return notes


def paste(settings: dict[str, Any], where: str) -> list[str]:
    """Python and JSON that switch it on, with settings from `where`: a file, ``"config.json"`` or the ``"options"``."""
    from flexmask.attention import RECOMMENDED

    options = {name: value for name, value in settings.items() if (name, value) != ("method", RECOMMENDED)}
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    if where == "config.json":
        given = ""
    elif "layers" in options:
        given = f", settings={where!r}"
    lines = ["To use it:", "", f"  with flexmask.sparse_prefill(model{given}) as run:", "      model.generate(**inputs)"]
    if where == "config.json":
        return [*lines, "", "with the settings that the model's config.json holds."]
    if "layers" in options:
        return lines
    return [
        *lines, "",
        f'The same in the model\'s config.json is "flexmask_config": {json.dumps(settings)}.',
        "By itself it does nothing. These read it: sparse_prefill(model) without options, the plug-ins for vLLM and SGLang, and",
        'after flexmask.integrations.huggingface.register() models loaded with attn_implementation="flexmask".',
    ]  # fmt: skip


def _short(number: float, space: str = "") -> str:
    """A number with a unit: 3.67M, 612T."""
    unit, sign = next(((unit, sign) for unit, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if number >= unit), (1.0, ""))
    return f"{number / unit:.3g}{space}{sign}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


def _lengths(text: str) -> list[int]:
    lengths = [_number(part, int, "--tokens") for part in text.split(",")]
    if min(lengths) < 2:
        usage_error(f"must be lengths of at least 2 tokens, as in 32768,131072; got {text!r}", "--tokens")
    return lengths


def _densities(text: str) -> list[float]:
    shares = [_number(part, float, "--density") for part in text.split(",")]
    if not all(0 < share <= 1 for share in shares):
        usage_error(f"must be shares in (0, 1], as in 0.1,0.4; got {text!r}", "--density")
    return shares


def _number(text: str, kind: type[Number], option: str) -> Number:
    try:
        return kind(text)
    except ValueError:
        usage_error(f"must be numbers, as in 1,2; got {text!r}", option)
