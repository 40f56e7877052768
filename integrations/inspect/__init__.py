"""Inspects one prompt's prefill: statistics per head, and the coverage of its masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from flexmask._torch import is_fake
from flexmask.environment import device_name
from flexmask.integrations.huggingface.call import LayerCall
from flexmask.integrations.huggingface.compat import input_device, unwrapped
from flexmask.integrations.huggingface.context_manager import opened_scope
from flexmask.integrations.huggingface.model_config import model_settings
from flexmask.integrations.inspect.coverage_probe import CoverageProbe
from flexmask.integrations.inspect.page import write_report
from flexmask.integrations.record import PrefillRun
from flexmask.integrations.record.calls import finite
from flexmask.settings import PrefillSettings

__all__ = ["Inspection", "ShownHead", "inspect_prefill", "write_report"]


@dataclass(frozen=True)
class ShownHead:
    """One head: why it is shown, its true attention, and its mask."""

    layer: int
    head: int
    why: str
    # attention of a query block's rows to a key block, mean over rows, (num_q_blocks, num_kv_blocks) float32
    mass: Tensor = field(repr=False)
    kept: Tensor = field(repr=False)  # bool, of the same shape
    row: Mapping[str, Any] = field(repr=False)  # of ``run.rows()``
    block_size: int = 128

    @property
    def attention_kept(self) -> float:
        """Coverage over all rows: the share of `mass` in kept blocks."""
        return float((self.mass * self.kept).nansum() / self.mass.nansum())


@dataclass(frozen=True)
class Inspection:
    """One prompt's prefill, by layer and head."""

    run: PrefillRun  # statistics
    heads: tuple[ShownHead, ...]
    # by sparse layer, for each quarter of the prompt: share of eight rows' true attention in kept blocks, mean over heads
    coverage_by_quarter: dict[int, tuple[float, ...]]
    about: dict[str, Any]  # names and versions

    def to_dict(self) -> dict[str, Any]:
        """JSON types; None for numbers that are not finite."""
        shown_rows = [
            {"layer": head.layer, "head": head.head, "why": head.why, "attention_kept": head.attention_kept}
            for head in self.heads
        ]
        figures = {
            "about": self.about,
            "settings": self.run.settings.to_dict(),
            "summary": self.run.summary().to_dict(),
            "shown": shown_rows,
            "coverage_by_quarter": {str(layer): shares for layer, shares in self.coverage_by_quarter.items()},
            "rows": self.run.rows(),
        }
        return finite(figures)


def inspect_prefill(
    model: Any,
    input_ids: Tensor,
    method: str | None = None,
    settings: PrefillSettings | str | Path | None = None,
    *,
    heads: Sequence[tuple[int, int]] | None = None,
    **options: Any,
) -> Inspection:
    """Prefill one prompt and gather what the method chose in it.

    The first of two prefills takes statistics. The second compares masks with true attention, which for the heads shown takes
    the time of dense attention.

    Parameters
    ----------
    model
        As in `sparse_prefill`, in one process.
    input_ids
        (length,) or (1, length) integer: one prompt.
    method, settings, options
        As in `sparse_prefill`; `method` by name only.
    heads
        Pairs of layer and head to show. Default: those of the lowest, median and highest density, and the one of the lowest
        coverage.

    Returns
    -------
    Inspection
        For `flexmask.integrations.inspect.write_report`.

    Raises
    ------
    TypeError, ValueError
        As `sparse_prefill`; for more than one prompt, heads that do not exist or ran dense, a method that is a function, and a
        model without a layer that calls flexmask's attention.
    ImportError, NotImplementedError
        As `sparse_prefill`.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> inspection = inspect_prefill(model, torch.arange(600) % 64, dense_layers=(0, 1))
    >>> inspection.run.summary().layers[1].ran
    'dense'
    """
    inner_model = unwrapped(model)
    run_settings = model_settings(inner_model, method=method, settings=settings, **options)
    if callable(run_settings.method):
        raise ValueError("method must be a name to be inspected, one of flexmask.METHODS; got a function")
    ids = _one_prompt(input_ids)
    _check_in_one_process(inner_model)
    device = input_device(inner_model)

    def prefill(run: PrefillRun, run_call: Callable[[LayerCall], Tensor]) -> None:
        with opened_scope(inner_model, run, run_call), torch.no_grad():
            inner_model.base_model(input_ids=ids.to(device), use_cache=False)

    run = PrefillRun(run_settings, max_calls=None)
    prefill(run, LayerCall.output)
    rows = {(row["layer"], row["head"]): row for row in run.rows()}
    if not rows:
        raise ValueError(
            f"model must have a layer that calls flexmask's attention; got {type(inner_model).__name__}, which has none"
        )
    why_shown = shown_heads(rows, heads)
    probe = CoverageProbe(why_shown)
    prefill(PrefillRun(run_settings, collect_stats=False), probe)
    shown = tuple(
        ShownHead(*head, why, *probe.maps[head], rows[head], run_settings.block_size) for head, why in why_shown.items()
    )
    coverage = {layer: tuple(by_head.mean(0).tolist()) for layer, by_head in sorted(probe.coverage.items())}
    about = {
        "model": type(inner_model).__name__,
        "tokens": int(ids.shape[1]),
        "device": device_name(device),
        "dtype": str(inner_model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return Inspection(run, shown, coverage, about)


def shown_heads(
    rows: Mapping[tuple[int, int], Mapping[str, Any]], named_heads: Sequence[tuple[int, int]] | None = None
) -> dict[tuple[int, int], str]:
    """The heads to show, (layer, head), and why: `named_heads`, else some by density and coverage; none if all ran dense."""
    sparse_heads = [head for head, row in rows.items() if row["pattern"] != "dense"]
    if named_heads is not None:
        for pair in named_heads:
            if pair not in sparse_heads:
                raise ValueError(f"heads must be pairs of a layer and a head that ran sparse; got {pair}")
        return {(int(layer), int(head)): "named" for layer, head in named_heads}
    by_density = sorted(sparse_heads, key=lambda head: (rows[head]["density"], head))
    # coverage of all rows by hybrid's estimate, else of the last rows; an empty list if neither is known
    coverage = {
        head: [share for share in map(rows[head].get, ("row_coverage", "coverage")) if share == share] for head in sparse_heads
    }
    by_coverage = sorted(filter(coverage.get, sparse_heads), key=lambda head: (coverage[head][0], head))
    picks = [("lowest density", by_density[:1]), ("median density", by_density[len(sparse_heads) // 2 :][:1])]
    picks += [("highest density", by_density[-1:]), ("lowest coverage", by_coverage[:1])]
    why_shown: dict[tuple[int, int], str] = {}
    for why, heads in picks:
        for head in heads:
            why_shown.setdefault(head, why)
    return why_shown


def _check_in_one_process(model: PreTrainedModel) -> None:
    """Raise NotImplementedError for a model under tensor parallelism, ValueError for a model of fake tensors."""
    if any(is_fake(parameter) for parameter in model.parameters()):
        raise ValueError("inspect_prefill needs a model with values; got one of fake tensors (FakeTensorMode)")
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise NotImplementedError(
            "inspect_prefill does not support a model spread over processes; load it on one, or with device_map"
        )


def _one_prompt(input_ids: Any) -> Tensor:
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids must be a tensor; got {type(input_ids).__name__}")
    ids = input_ids[None] if input_ids.dim() == 1 else input_ids
    dtype = ids.dtype
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 2 or not is_integer:
        expected = "input_ids must be (length,) or (1, length) integer, one prompt of at least two tokens"
        raise ValueError(f"{expected}; got {tuple(input_ids.shape)} {dtype}")
    return ids
