"""``flexmask gain``: the speedup of a model's first token on this machine, and its price."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flexmask.commands.loading import load_model, prompt_ids, read_text
from flexmask.commands.options import Common, Model, Prompt, with_common
from flexmask.commands.output import Output
from flexmask.json_settings import keywords_of

MIN_GAIN = 1.05  # ratio of times to first token that counts as a gain


@with_common
def gain(
    common: Common,
    model: Model,
    prompt: Prompt,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for all prefills; as many rounds are timed as fit.")] = 10,
) -> None:
    """Measure what sparse prefill gains on this machine, and its error.

    Prefills the prompt with the model's own attention and sparse, in turns. Take a prompt of the kind and length that the model
    will read: both decide the gain.
    """
    output = Output(common.as_json)
    chosen, text = common.prefill_settings(), read_text(prompt, output)
    loaded, tokenizer = load_model(model, output, common.device, common.dtype)
    ids, settings = prompt_ids(loaded, tokenizer, text), common.settings_of(loaded.config.get_text_config(), chosen)
    from flexmask.commands.gain_model import measure_prompt

    document = {"model": model, **measure_prompt(loaded, ids, settings, minutes, output)}
    document["gains"] = document["ratio"] is not None and document["ratios"][0] >= MIN_GAIN
    document["conclusion"] = conclusion(document)
    _show(output, document)
    if document["gains"] and common.settings is None:
        given = "".join(f", {name}={value!r}" for name, value in keywords_of(common.given()).items())
        output.line("", f"To use it: with flexmask.sparse_prefill(model{given}): model.generate(**inputs)")
    output.result(document)


def conclusion(document: dict[str, Any]) -> str:
    start, ratio = f"{document['tokens']:,} tokens: ", document["ratio"]
    if ratio is None:
        reason = max(document["reasons"], key=document["reasons"].get, default="no layer runs sparse")
        return f"{start}nothing to gain; {reason}"
    (least, most), where = document["ratios"], f"at density {document['density']:.0%}"
    if most < MIN_GAIN:
        return f"{start}nothing to gain; the first token comes less than 5% sooner {where}"
    if least < MIN_GAIN:
        runs = f"{least:.2f}x to {most:.2f}x {where}, depending on the run"
        return f"{start}inconclusive; time to first token improves {runs}. Repeat it on a quiet machine"
    return f"{start}time to first token improves {ratio:.2f}x {where}"


def _show(output: Output, found: dict[str, Any]) -> None:
    output.line(f"{found['model']} ({found['type']}), {found['tokens']:,} tokens, {found['dtype']}")
    output.line(f"torch {found['torch']}, on {found['device']}", "")
    error = found["error"]
    if error is not None:
        ratios = "one run" if found["runs"] == 1 else " to ".join(f"{ratio:.2f}" for ratio in found["ratios"])
        dense, sparse = (f"{found[name]:.3g} s" for name in ("dense_seconds", "sparse_seconds"))
        rows = [
            [f"dense ({found['dense']})", "100%", dense, "", ""],
            [found["settings"]["method"], f"{found['density']:.1%}", sparse, f"{found['ratio']:.2f}x", ratios],
        ]
        output.table(["attention", "density", "time to first token", "speed-up", "range over runs"], rows)
        before, after = error["loss_dense"], error["loss_sparse"]
        change = f"|Δ log p| {error['log_prob_change']:.3f}, loss {before:.3f} -> {after:.3f} ({after - before:+.3f})"
        output.line("", f"Error on this prompt, over {error['tokens']:,} tokens: {change}")
    if found["low_heads"]:
        output.line(f"warning: {found['low_heads']}")
    output.line("", found["conclusion"])
