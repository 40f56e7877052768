"""Time to first token in a model's shape with random weights: ``python -m bench.speed.model --shape llama-3.1-8b --density 0.2``.

Prints times, memory, and how many generated tokens equal dense attention's, over random blocks at each ``--density``.
`flexmask gain` measures a trained model. Several GPUs: ``torchrun --nproc-per-node 2 -m bench.speed.model --tensor-parallel ..``
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.decoding import decode, prefill
from bench.prompts.models import SHAPES, load, prompt_ids
from bench.rows import append_row
from bench.speed import random_blocks as random_blocks  # registers the method
from bench.speed.clock import kernels_of, synchronize
from bench.tables import text_table
from flexmask.integrations.huggingface import sparse_prefill

Way = Callable[[], AbstractContextManager[Any]]
_ATTENTION = ("flex_attention", "triton_tem_", "flash", "cutlass", "cudnn")


def part_of(kernel: str) -> str:
    """attention, mask or rest, by the name of a GPU's kernel; ours, which make masks, begin with an underscore."""
    if kernel.startswith("_") and not kernel.startswith("_Z"):  # mangled C++
        return "mask"
    return "attention" if any(word in kernel for word in _ATTENTION) else "rest"


def measure(model: Any, ids: Tensor, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the model's present attention; medians without the first prefill, which compiles."""
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(1 + options.prefills):
        synchronize()
        start = time.perf_counter()
        logits, cache = prefill(model, ids, options.chunk)
        logits.argmax().item()
        times.append(time.perf_counter() - start)
        if len(times) == 1:
            tokens = decode(model, logits, cache, options.new_tokens)[0].tolist()
        del logits, cache
    row = {"method": name, "prompt_tokens": ids.shape[1], "seconds": statistics.median(times[1:]), "first_seconds": times[0]}
    if ids.is_cuda:
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        parts = dict.fromkeys(("attention_ms", "mask_ms", "rest_ms"), 0.0)
        of_kernel: dict[str, float] = {}
        for kernel, microseconds in kernels_of(partial(prefill, model, ids, options.chunk)):
            part = part_of(kernel)
            parts[f"{part}_ms"] += microseconds / 1e3
            if part == "attention":
                of_kernel[kernel] = of_kernel.get(kernel, 0.0) + microseconds
        # SDPA takes the first kernel that serves the head dims
        row |= {**parts, "attention_kernel": max(of_kernel, key=lambda name: of_kernel[name], default="")[:80]}
    return {**row, "tokens": tokens}


def ways(model: Any, options: argparse.Namespace) -> Iterator[tuple[str, Way]]:
    """Each kind of attention: its name, and a context that switches it on."""
    if torch.device(options.device).type == "cuda":
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        yield "dense (SDPA, cuDNN)", lambda: sdpa_kernel(backends, set_priority=True)
    else:
        yield "dense (SDPA)", nullcontext
    common = {} if options.dense_below is None else {"dense_below": options.dense_below}
    for density in options.density:
        yield f"random blocks, {density:g}", partial(sparse_prefill, model, "random_blocks", density=density, **common)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of one prompt, with ratios to dense attention."""
    base = rows[0]
    lines: list[Sequence[str]] = [("", "first token", "dense / this", "attention", "mask", "rest", "peak", "tokens as dense")]
    for row in rows:
        same = sum(left == right for left, right in zip(row["tokens"], base["tokens"], strict=True))
        parts = (f"{row[part]:.1f} ms" if part in row else "-" for part in ("attention_ms", "mask_ms", "rest_ms"))
        peak = f"{row['peak_gb']:.1f} GB" if "peak_gb" in row else "-"
        ratio = f"{base['seconds'] / row['seconds']:.2f}x"
        lines.append((row["method"], f"{row['seconds']:.3f} s", ratio, *parts, peak, f"{same} of {len(row['tokens'])}"))
    return text_table(lines, "<>>>>>><")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True, help="this model's shape")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32768], help="lengths of the prompts")
    parser.add_argument("--chunk", type=int, help="prefill in chunks of this many tokens")
    parser.add_argument("--density", type=float, nargs="*", default=[], help="densities to force with random blocks")
    parser.add_argument("--dense-below", type=int, help="as in sparse_attention")
    parser.add_argument("--prefills", type=int, default=3, help="prefills that the median is taken over")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens to generate and compare")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tensor-parallel", action="store_true", help="under torchrun, by transformers' tp_plan")
    parser.add_argument("--json", type=Path, help="file to append the rows to, one per line")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    transformers.utils.logging.disable_progress_bar()
    model = load(options)
    device, layers = next(model.parameters()).device, model.config.num_hidden_layers
    speaks, processes = (dist.get_rank() == 0, dist.get_world_size()) if dist.is_initialized() else (True, 1)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    if speaks:
        print(f"{options.shape}, {layers} layers, {options.dtype}, on {processes} x {where}, torch {torch.__version__}\n")
    for tokens in options.prompt_tokens:
        ids = prompt_ids(tokens, model.config.vocab_size).to(device)
        rows = []
        for name, way in ways(model, options):
            with way():
                rows.append(measure(model, ids, name, options))
        if speaks:
            print(f"{tokens:,} tokens" + (f", in chunks of {options.chunk:,}" if options.chunk else ""))
            print(table(rows) + "\n", flush=True)
            for row in rows:
                if row.get("attention_kernel"):
                    print(f"{row['method']}: {row['attention_kernel']}")
            for row in rows if options.json else ():
                append_row(options.json, {"model": options.shape, "layers": layers, "processes": processes, **row})
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
