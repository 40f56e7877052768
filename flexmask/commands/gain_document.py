"""The measurements of ``flexmask gain`` as one document: of random blocks for a config, or of one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from flexmask.commands.errors import option_errors
from flexmask.commands.loading import load_config, load_model, remark_if_short, token_ids
from flexmask.commands.output import Output
from flexmask.environment import device_name
from flexmask.settings import PrefillSettings


def of_config(
    output: Output,
    model: str,
    chosen: PrefillSettings | None,
    lengths: Sequence[int],
    densities: Sequence[float],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    config = load_config(model, "MODEL")
    from flexmask.commands.gain_model import weights_per_token
    from flexmask.commands.gain_times import matmul_speed, model_times
    from flexmask.integrations.huggingface.layer_plan import layer_plan

    text = config.get_text_config()
    longest, rows = getattr(text, "max_position_embeddings", None), []
    if longest is not None and max(lengths) > longest:
        output.remark(f"{max(lengths):,} tokens exceed the model's max_position_embeddings, {longest:,}")
    with output.progress("timing one length" if len(lengths) == 1 else f"timing {len(lengths)} lengths") as advance:
        advance(0, len(lengths))
        used = _settings_of(config, chosen)
        speed, weights = matmul_speed(max(lengths), text.hidden_size, device, dtype), weights_per_token(config)
        for length in lengths:
            plan = layer_plan(config, settings=used, tokens=length, device=device, dtype=dtype)
            row = _row(length, (layer.plan for layer in plan), (layer.reason for layer in plan))
            if row["layers"].get("sparse"):
                times = model_times(plan, length, densities, used, speed, device, dtype)
                row |= with_first_tokens({"rest_seconds": 2 * weights * length / speed, **times})
            rows.append(row)
            advance(len(rows), len(lengths))
    return {
        **_about(model, type(config).__name__, used, device, dtype),
        "source": "random blocks",
        "matmul_flops_per_second": speed,
        "weights_per_token": weights,
        "lengths": rows,
    }


def of_prompt(
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
    from flexmask.commands.gain_model import answers, prompt_gain

    ids, used = token_ids(tokenizer, text, chat=chat), _settings_of(loaded.config, chosen)
    remark_if_short(output, loaded, used, ids.shape[1])
    with output.progress(f"three prefills of {ids.shape[1]:,} tokens") as advance:
        summary, times, error = prompt_gain(loaded, ids, used, advance)
    plans = ("dense" if layer.ran == "dense" else "sparse" for layer in summary.layers)
    row = _row(ids.shape[1], plans, (reason for layer in summary.layers for reason in sorted(layer.reasons)))
    if times:
        row |= with_first_tokens(times)
    continued = {}
    if new_tokens:
        with output.progress(f"two answers of {new_tokens:,} tokens"):
            continued = answers(loaded, ids, used, new_tokens)
    return {
        **_about(model, type(loaded.config).__name__, used, device, dtype),
        "source": "prompt",
        "lengths": [row],
        "low_heads": summary.warning,
        "error": error,
        "answers": {
            name: {"tokens": new, "text": tokenizer.decode(new, skip_special_tokens=True)} for name, new in continued.items()
        },
    }


def _settings_of(config: Any, chosen: PrefillSettings | None) -> PrefillSettings:
    """The chosen settings, else those in the config, else the defaults; checked for the model."""
    from flexmask.integrations.huggingface.model_config import settings_for

    with option_errors(otherwise="--option"):
        settings = settings_for(config.get_text_config(), chosen)
        settings.check_model(config.get_text_config())
    return settings


def _row(tokens: int, plans: Iterable[str], reasons: Iterable[str]) -> dict[str, Any]:
    """A length: its layers by plan, and by reason for not running sparse; `with_first_tokens` adds the times."""
    counts = {"layers": dict(Counter(plans)), "reasons": dict(Counter(filter(None, reasons)))}
    return {"tokens": tokens, **counts, "rest_seconds": 0.0, "dense": None, "sparse": []}


def _about(model: str, name: str, settings: PrefillSettings, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "model": model,
        "type": name,
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "settings": {"method": settings.method, **settings.to_dict()},
    }


def with_first_tokens(times: dict[str, Any]) -> dict[str, Any]:
    """Medians of the rounds, and the expected time to first token: attention, selection and the rest of the model.

    `first_token_ratios` are the smallest and largest ratio of one round.
    """
    rest, attention = times["rest_seconds"], np.asarray(times["dense"]["attention_seconds"])
    dense_first, dense_seconds = rest + attention, float(np.median(attention))
    dense = {"attention_seconds": dense_seconds, "first_token_seconds": rest + dense_seconds}
    sparse = []
    for way in times["sparse"]:
        parts = {name: np.asarray(way[name]) for name in ("selection_seconds", "attention_seconds")}
        ratios = dense_first / (rest + sum(parts.values()))
        medians = {name: float(np.median(seconds)) for name, seconds in parts.items()}
        taken = sum(medians.values())
        sparse.append(
            {
                **way,
                **medians,
                "first_token_seconds": rest + taken,
                "attention_ratio": dense_seconds / taken,
                "first_token_ratio": (rest + dense_seconds) / (rest + taken),
                "first_token_ratios": [float(ratios.min()), float(ratios.max())],
            }
        )
    return {**times, "dense": {**times["dense"], **dense}, "sparse": sparse}
