"""A run on disk: settings and statistics as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmask.base.scores import widest_float
from flexmask.integrations.record.calls import Calls, CallSize, HeadSums, LayerTotals, RecordedCall, calls_on_host
from flexmask.settings import PrefillSettings
from flexmask.stats import DTYPES, SelectionStats

_FORMAT = "flexmask run 5"
_MOST_BYTES = 2**30  # 512 calls in each of 128 layers of 128 heads are 0.9 GB


class SavedRun(NamedTuple):
    settings: PrefillSettings
    calls: Calls
    dropped: Mapping[int, LayerTotals]
    tokens: Mapping[int, int]  # by layer, including dropped calls
    sequences: Mapping[int, int]


def save_run(path: Path, run: SavedRun) -> None:
    calls = {layer: [_call_to_save(call) for call in recorded] for layer, recorded in calls_on_host(run.calls).items()}
    dropped = {layer: _totals_to_save(total) for layer, total in run.dropped.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    by_layer = {"calls": calls, "dropped": dropped, "tokens": run.tokens, "sequences": run.sequences}
    write_json(path, {"format": _FORMAT, "settings": run.settings.to_dict(), **by_layer})


def write_json(path: Path, saved: Any) -> None:
    """An interruption leaves the former file."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(saved, allow_nan=False), encoding="utf-8")
    os.replace(part, path)


def finite(value: Any) -> Any:
    """The value with None for floats that are not finite, which JSON lacks; tuples become lists."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load_run(path: Path) -> SavedRun:
    """Read a run, its tensors on the CPU; ValueError for another file."""
    size = path.stat().st_size
    if not path.is_file() or size > _MOST_BYTES:
        raise ValueError(f"path must be a regular file of at most {_MOST_BYTES:,} bytes; got {path} of {size:,}")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["format"] != _FORMAT:
            raise ValueError(saved["format"])
        calls = {_count(int(layer)): [_call(call) for call in recorded] for layer, recorded in saved["calls"].items()}
        dropped = {_count(int(layer)): _totals(total) for layer, total in saved["dropped"].items()}
        tokens, sequences = (
            {_count(int(layer)): _count(number) for layer, number in saved[name].items()} for name in ("tokens", "sequences")
        )
        return SavedRun(PrefillSettings.from_dict(saved["settings"]), calls, dropped, tokens, sequences)
    except (AttributeError, KeyError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"path must be a file that run.save wrote; got {path}") from error


def _call_to_save(call: RecordedCall) -> dict[str, Any]:
    tensors = {name: finite(getattr(call.stats, name).tolist()) for name in DTYPES}
    return {**tensors, "dense": call.stats.dense, "reason": call.reason, "prefill": call.prefill, "size": call.size}


def _call(saved: Mapping[str, Any]) -> RecordedCall:
    tensors = {name: _tensor(saved[name], dtype) for name, dtype in DTYPES.items()}
    shapes = {tensor.shape for tensor in tensors.values()}
    if len(shapes) > 1 or min(map(len, shapes)) < 2 or 0 in next(iter(shapes)):
        raise ValueError(f"shapes {sorted(shapes)}")
    if saved["reason"] is not None and not isinstance(saved["reason"], str):
        raise TypeError(type(saved["reason"]).__name__)
    stats = SelectionStats(**tensors, dense=bool(saved["dense"]))
    return RecordedCall(stats, saved["reason"], _count(saved["prefill"]), CallSize(*map(_count, saved["size"])))


def _totals_to_save(total: LayerTotals) -> dict[str, Any]:
    sums = None if total.sums is None else HeadSums(*finite(total.sums.tolist()))._asdict()
    return {**vars(total), "sums": sums, "held": None if total.held is None else finite(total.held.tolist())}


def _totals(saved: Mapping[str, Any]) -> LayerTotals:
    sums, held = saved["sums"], saved["held"]
    if sums is not None:
        sums = _tensor([sums[name] for name in HeadSums._fields], widest_float(torch.device("cpu")))
    if held is not None:
        held = _tensor(held, torch.float32, math.inf)
    calls, dense_calls, heads = (_count(saved[name]) for name in ("calls", "dense_calls", "heads"))
    pairs, dense_pairs = float(saved["pairs"]), float(saved["dense_pairs"])
    if not 0 <= dense_pairs <= pairs < math.inf:
        raise ValueError(pairs)
    reasons = {reason: _count(number) for reason, number in saved["reasons"].items()}
    return LayerTotals(calls, dense_calls, heads, pairs, dense_pairs, reasons, sums, held)


def _tensor(saved: Any, dtype: torch.dtype, absent: float = math.nan) -> Tensor:
    """The tensor of saved numbers; `absent` stands for None."""

    def numbers(values: Any) -> Any:
        return [numbers(value) for value in values] if isinstance(values, list) else absent if values is None else values

    return torch.tensor(numbers(saved), dtype=dtype, device="cpu")


def _count(saved: Any) -> int:
    if type(saved) is not int or not 0 <= saved < 2**53:
        raise ValueError(saved)
    return saved
