"""Inspects one prompt's prefill: statistics per head, and what the masks hold of the true attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from flexmask.base.checks import check_int, plain_numbers
from flexmask.environment import device_name
from flexmask.integrations.huggingface.call import PrefillCall
from flexmask.integrations.huggingface.compat import check_in_one_process, input_device, text_config, unwrapped
from flexmask.integrations.huggingface.model_config import model_settings
from flexmask.integrations.huggingface.prefill import opened
from flexmask.integrations.inspect.attention_held import HeldAttention
from flexmask.integrations.inspect.page import NAMED, RULE, write_report
from flexmask.integrations.record import PrefillRun, RunSummary
from flexmask.integrations.record.calls import finite
from flexmask.settings import PrefillSettings

__all__ = ["Inspection", "ShownHead", "inspect_prefill", "write_report"]

MOST_LOST = 0.1  # an inspection warns if the last quarter holds this much less of its attention than the first


@dataclass(frozen=True)
class ShownHead:
    """One head, and why it is shown."""

    layer: int
    head: int
    why: str
    # attention of a query block's rows to a key block, mean over rows, (num_q_blocks, num_kv_blocks) float32
    mass: Tensor = field(repr=False)
    kept: Tensor = field(repr=False)  # bool, of the same shape
    row: dict[str, Any] = field(repr=False)  # of ``run.rows()``
    block_size: int = 128

    @property
    def attention_kept(self) -> float:
        return float((self.mass * self.kept).nansum() / self.mass.nansum())


@dataclass(frozen=True)
class Inspection:
    """One prompt's prefill, by layer and head."""

    run: PrefillRun  # statistics
    heads: tuple[ShownHead, ...]
    # by sparse layer and quarter of the prompt: share of the true attention of eight rows that kept blocks hold, mean over heads
    held: dict[int, tuple[float, float, float, float]]
    about: dict[str, Any]  # names and versions

    @property
    def held_by_quarter(self) -> tuple[float, ...]:
        """`held`, mean over layers; empty if no layer ran sparse."""
        return tuple(sum(shares) / len(shares) for shares in zip(*self.held.values(), strict=True))

    @property
    def warning(self) -> str | None:
        """A sentence if the last quarter holds over 0.1 less of its attention than the first."""
        held = self.held_by_quarter
        if not held or not held[0] - held[-1] > MOST_LOST:  # also for NaN
            return None
        method = self.run.settings.selector().method
        advice = f"Let method {method.name!r} keep more blocks."
        if "gamma" in method.shares:
            advice = "Raise gamma."
        lost = f"The mask holds {held[-1]:.1%} of the attention of the prompt's last quarter, {held[0]:.1%} of the first's."
        return f"{lost} {advice}"

    @property
    def summary(self) -> RunSummary:
        return self.run.summary()

    def to_dict(self) -> dict[str, Any]:
        """JSON types; None for numbers that are not finite."""
        shown = [{"layer": x.layer, "head": x.head, "why": x.why, "attention_kept": x.attention_kept} for x in self.heads]
        figures = {
            "about": self.about,
            "settings": self.run.settings.to_dict(),
            "summary": self.summary.to_dict(),
            "shown": shown,
            "rule": RULE,
            "held": {str(layer): shares for layer, shares in self.held.items()},
            "held_by_quarter": self.held_by_quarter,
            "warning": self.warning,
            "rows": self.run.rows(),
        }
        return finite(figures)


def inspect_prefill(
    model: Any,
    input_ids: Tensor,
    method: str | None = None,
    settings: PrefillSettings | str | Path | None = None,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Inspection:
    """Prefill one prompt and gather what the method chose in it.

    The first of two prefills takes statistics. The second compares masks with true attention, for the heads shown in the time of
    dense attention.

    Parameters
    ----------
    model
        As in `sparse_prefill`, in one process.
    input_ids
        (length,) or (1, length) integer: one prompt.
    method, settings, options
        As in `sparse_prefill`; `method` by name only.
    layers, heads
        Shows the masks of every pair; by default of heads chosen by `flexmask.integrations.inspect.RULE`, in `layers` if given.
    progress
        Called with the finished layers and all layers, of both prefills.

    Returns
    -------
    Inspection
        For `flexmask.integrations.inspect.write_report`.

    Raises
    ------
    TypeError, ValueError
        As `sparse_prefill`; for more than one prompt, `heads` without `layers`, layers or heads that do not exist or ran dense, a
        method that is a function, and a model without a layer that calls flexmask's attention.
    ImportError, NotImplementedError
        As `sparse_prefill`.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> inspection = inspect_prefill(model, torch.arange(600) % 64, dense_layers=(0, 1))
    >>> inspection.summary.layers[1].ran
    'dense'
    """
    inner = unwrapped(model)
    used = model_settings(inner, method=method, settings=settings, **options)
    if callable(used.method):
        raise ValueError("method must be a name to be inspected, one of flexmask.METHODS; got a function")
    ids = _one_prompt(input_ids)
    number = int(getattr(text_config(inner), "num_hidden_layers", 0))
    layers, heads = plain_numbers(layers), plain_numbers(heads)
    _check_shown(layers, heads, number)
    check_in_one_process(inner, "inspect_prefill")
    done, device = 0, input_device(inner)

    def prefill(run: PrefillRun, serve: Callable[[PrefillCall], Tensor]) -> None:
        def probe(call: PrefillCall) -> Tensor:
            nonlocal done
            out = serve(call)
            done += 1
            if progress is not None:
                progress(min(done, 2 * number), 2 * number)
            return out

        with opened(inner, run, probe), torch.no_grad():
            inner.base_model(input_ids=ids.to(device), use_cache=False)

    run = PrefillRun(used, max_calls=None)
    prefill(run, PrefillCall.output)
    rows = run.rows()
    if not rows:
        raise ValueError(f"model must have a layer that calls flexmask's attention; got {type(inner).__name__}, which has none")
    chosen = heads_by_rule(rows, layers) if heads is None or layers is None else named_heads(rows, layers, heads)
    compared = HeldAttention(chosen)
    prefill(PrefillRun(used, collect_stats=False), compared)
    by_head = {(row["layer"], row["head"]): row for row in rows}
    shown = tuple(ShownHead(*head, why, *compared.maps[head], by_head[head], used.block_size) for head, why in chosen.items())
    held = {layer: tuple(by_head.mean(0).tolist()) for layer, by_head in sorted(compared.held.items())}
    about = {"model": type(inner).__name__, "tokens": int(ids.shape[1]), "device": device_name(device)}
    about |= {"dtype": str(inner.dtype).removeprefix("torch."), "torch": torch.__version__}
    return Inspection(run, shown, held, {**about, "transformers": transformers.__version__})


def heads_by_rule(rows: Sequence[Mapping[str, Any]], layers: Sequence[int] | None = None) -> dict[tuple[int, int], str]:
    """Layer and head by `RULE`, and why, among the `rows` of one prefill; none if every head ran dense."""
    sparse = [row for row in rows if row["pattern"] != "dense" and (layers is None or row["layer"] in layers)]
    if not sparse:
        return {}
    by_density = sorted(sparse, key=lambda row: (row["density"], row["layer"], row["head"]))
    chosen = {"lowest density": by_density[0], "median density": by_density[len(by_density) // 2]}
    chosen["highest density"] = by_density[-1]
    covered = [row for row in sparse if not math.isnan(row["coverage"])]
    if covered:
        chosen["lowest coverage"] = min(covered, key=lambda row: (row["coverage"], row["layer"], row["head"]))
    reasons: dict[tuple[int, int], list[str]] = {}
    for why, row in chosen.items():
        reasons.setdefault((row["layer"], row["head"]), []).append(why)
    return {head: ", ".join(why) for head, why in reasons.items()}


def named_heads(rows: Sequence[Mapping[str, Any]], layers: Sequence[int], heads: Sequence[int]) -> dict[tuple[int, int], str]:
    """Every pair of `layers` and `heads`; ValueError for a missing head or a dense layer."""
    patterns = {(row["layer"], row["head"]): row["pattern"] for row in rows}
    for layer in layers:
        for head in heads:
            if (layer, head) not in patterns:
                number = sum(place[0] == layer for place in patterns)
                raise ValueError(f"heads must be in [0, {number}) in layer {layer}; got {head}")
            if patterns[layer, head] == "dense":
                raise ValueError(f"layers must have run sparse; layer {layer} ran dense")
    return {(layer, head): NAMED for layer in layers for head in heads}


def _one_prompt(input_ids: Any) -> Tensor:
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids must be a tensor; got {type(input_ids).__name__}")
    whole = not (input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool)
    ids = input_ids[None] if input_ids.dim() == 1 else input_ids
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 2 or not whole:
        expected = "input_ids must be (length,) or (1, length) integer, one prompt of at least two tokens"
        raise ValueError(f"{expected}; got {tuple(input_ids.shape)} {input_ids.dtype}")
    return ids


def _check_shown(layers: Sequence[int] | None, heads: Sequence[int] | None, number: int) -> None:
    if heads is not None and layers is None:
        raise ValueError("heads must come with layers")
    for name, indices in (("layers", layers), ("heads", heads)):
        if indices is not None and not len(indices):
            raise ValueError(f"{name} must name at least one")
        for index in indices or ():
            check_int(name, index)
            if index < 0 or (name == "layers" and index >= number):
                raise ValueError(f"{name} must be " + (f"in [0, {number})" if name == "layers" else ">= 0") + f"; got {index}")
