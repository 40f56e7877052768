"""Time to first token of a Hugging Face model, dense and with FlexPrefill: ``python -m bench.hf --model PATH_OR_NAME``.

Prints one table: time to first token and its breakdown, memory, density, and how many generated tokens match dense attention's.
``--shape`` takes a known model's shape with random weights instead. Their density means nothing, so ``--density`` forces one with
random blocks. On several GPUs: ``torchrun --nproc-per-node 2 -m bench.hf --tensor-parallel ...``.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from bench.measure.first_token import FirstToken, density_of, measure, ways
from bench.measure.rows import append_row
from bench.prompts.models import SHAPES, load, prompt_ids
from bench.reporting.tables import text_table
from flexmask.integrations.huggingface import FlexPrefillRun


def table(rows: Sequence[FirstToken]) -> str:
    """Format the rows of one prompt length; ratios refer to the fastest dense attention."""
    dense = [row for row in rows if row.method.startswith("dense")]
    base = min(dense, key=lambda row: row.seconds)
    lines: list[Sequence[str]] = [
        ("", "first token", "dense / this", "attention", "mask", "rest", "peak", "density", "tokens as dense")
    ]
    for row in rows:
        same = sum(left == right for left, right in zip(row.tokens, base.tokens, strict=True))
        lines.append(
            (
                row.method,
                f"{row.seconds:.3f} s",
                f"{base.seconds / row.seconds:.2f}x",
                *("-" if x is None else f"{x:.1f} ms" for x in (row.attention_ms, row.mask_ms, row.rest_ms)),
                "-" if row.peak_gb is None else f"{row.peak_gb:.1f} GB",
                "-" if row.density is None else f"{row.density:.3f}",
                f"{same} of {len(row.tokens)}",
            )
        )
    return text_table(lines, "<>>>>>>><")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder or name of a model that transformers can load")
    which.add_argument("--shape", choices=sorted(SHAPES), help="this model's shape, with random weights")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32768], help="lengths of the prompts")
    parser.add_argument("--text", help="file whose first tokens are the prompt; default: seeded random tokens")
    parser.add_argument("--chunk", type=int, help="prefill in chunks of this many tokens")
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--tau", type=float, default=0.1)
    parser.add_argument("--density", type=float, nargs="*", default=[], help="densities to force with random blocks")
    parser.add_argument("--dense-below", type=int, help="as in flexprefill_attention")
    parser.add_argument("--default-sdpa", action="store_true", help="also measure dense attention with torch's choice of backend")
    parser.add_argument("--prefills", type=int, default=3, help="prefills that the median is taken over")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens to generate and compare")
    parser.add_argument("--layers", type=int, help="with --shape: fewer layers than the model has")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tensor-parallel", action="store_true", help="under torchrun, by transformers' tp_plan")
    parser.add_argument("--json", type=Path, help="file to append the rows to, one per line")
    options = parser.parse_args(arguments)
    if options.text and not options.model:
        parser.error("--text needs --model, whose tokenizer reads it")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the model, measure each kind of attention at each length, print the tables."""
    options = parse(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    transformers.utils.logging.disable_progress_bar()
    model = load(options)
    device = next(model.parameters()).device
    speaks, processes = (dist.get_rank() == 0, dist.get_world_size()) if dist.is_initialized() else (True, 1)
    if speaks:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
        named = options.model or f"{options.shape} (random weights)"
        layers, releases = model.config.num_hidden_layers, f"torch {torch.__version__}, transformers {transformers.__version__}"
        print(f"{named}, {layers} layers, {options.dtype}, on {processes} x {where}, {releases}\n")
    for tokens in options.prompt_tokens:
        ids = prompt_ids(options, tokens, model.config.vocab_size).to(device)
        rows = []
        for name, way in ways(model, options):
            with way() as run:
                rows.append(measure(model, ids, name, options))
            if isinstance(run, FlexPrefillRun) and not callable(run.settings.method):
                rows[-1].density = density_of(model, ids, options)
        if speaks:
            print(f"{tokens:,} tokens" + (f", in chunks of {options.chunk:,}" if options.chunk else ""))
            print(table(rows) + "\n", flush=True)
            if options.json:
                named = {
                    "model": options.model or options.shape,
                    "layers": model.config.num_hidden_layers,
                    "processes": processes,
                }
                for row in rows:
                    append_row(options.json, {**named, **asdict(row)})
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
