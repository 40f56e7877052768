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
    override, text = common.prefill_settings(), read_text(prompt, output)
    loaded_model, tokenizer = load_model(model, output, common.device, common.dtype)
    ids = prompt_ids(loaded_model, tokenizer, text)
    settings = common.settings_of(loaded_model.config.get_text_config(), override)
    from flexmask.commands.gain_model import measure_prompt

    document = {"model": model, **measure_prompt(loaded_model, ids, settings, minutes, output)}
    document["gains"] = document["ratio"] is not None and document["ratios"][0] >= MIN_GAIN
    document["conclusion"] = conclusion(document)
    _show(output, document)
    if document["gains"] and common.settings is None:
        keywords = "".join(f", {name}={value!r}" for name, value in keywords_of(common.settings_by_name()).items())
        output.line("", f"To use it: with flexmask.sparse_prefill(model{keywords}): model.generate(**inputs)")
    output.result(document)


def conclusion(document: dict[str, Any]) -> str:
    """One line on whether the prompt gains, by the document of `gain`."""
    start, ratio = f"{document['tokens']:,} tokens: ", document["ratio"]
    if ratio is None:
        reason = max(document["reasons"], key=document["reasons"].get, default="no layer runs sparse")
        return f"{start}nothing to gain; {reason}"
    (least, most), at_density = document["ratios"], f"at density {document['density']:.0%}"
    if most < MIN_GAIN:
        return f"{start}nothing to gain; the first token comes less than 5% sooner {at_density}"
    if least < MIN_GAIN:
        ratios = f"{least:.2f}x to {most:.2f}x {at_density}"
        return f"{start}inconclusive; time to first token improves {ratios}, depending on the run. Repeat it on a quiet machine"
    return f"{start}time to first token improves {ratio:.2f}x {at_density}"


def _show(output: Output, document: dict[str, Any]) -> None:
    output.line(f"{document['model']} ({document['type']}), {document['tokens']:,} tokens, {document['dtype']}")
    output.line(f"torch {document['torch']}, on {document['device']}", "")
    error = document["error"]
    if error is not None:
        ratios = "one run" if document["runs"] == 1 else " to ".join(f"{ratio:.2f}" for ratio in document["ratios"])
        dense, sparse = (f"{document[name]:.3g} s" for name in ("dense_seconds", "sparse_seconds"))
        rows = [
            [f"dense ({document['dense']})", "100%", dense, "", ""],
            [document["settings"]["method"], f"{document['density']:.1%}", sparse, f"{document['ratio']:.2f}x", ratios],
        ]
        output.table(["attention", "density", "time to first token", "speed-up", "range over runs"], rows)
        before, after = error["loss_dense"], error["loss_sparse"]
        change = f"|Δ log p| {error['log_prob_change']:.3f}, loss {before:.3f} -> {after:.3f} ({after - before:+.3f})"
        output.line("", f"Error on this prompt, over {error['tokens']:,} tokens: {change}")
    if document["low_heads"]:
        output.line(f"warning: {document['low_heads']}")
    output.line("", document["conclusion"])
