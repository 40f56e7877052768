"""Host time of a plan's run per layer, with and without replayed launches: ``python -m bench.speed.replay``.

Layers of one kind, random numbers, the nearest blocks. Both ways run in turns; layers do not wait for the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

import flexmask
from bench.speed.clock import device_name, synchronize
from bench.tables import text_table

_FIRST = 3  # layers that are not counted: the second captures
_WARM_UP = 3  # forward passes


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=12, help="query heads (12)")
    parser.add_argument("--kv-heads", type=int, default=2, help="KV heads (2)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8192, help="of a chunk (8,192)")
    parser.add_argument("--keys", type=int, default=32768, help="tokens so far (32,768)")
    parser.add_argument("--nearest", type=int, default=2688, help="tokens that each query block keeps (2,688)")
    parser.add_argument("--layers", type=int, default=28, help=f"more than {_FIRST}, which are not counted (28)")
    parser.add_argument("--rounds", type=int, default=10, help="forward passes of each way (10)")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    if options.layers <= _FIRST:
        parser.error(f"--layers must be more than {_FIRST}; got {options.layers}")
    return options


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Of each way and forward pass the median milliseconds of a layer's host, and those of all layers with the device."""
    generator = torch.Generator(options.device).manual_seed(0)
    shapes = [(1, options.heads, options.rows), *[(1, options.kv_heads, options.keys)] * 2]
    query, key, value = (
        torch.randn(*shape, options.head_dim, generator=generator, device=options.device).to(torch.bfloat16) for shape in shapes
    )
    plan = flexmask.plan(query, key, value, gamma=0.1, min_coverage=0, min_budget=options.nearest, dense_below=0)
    plans = {"replay": plan.with_replay, "no replay": lambda: plan}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in plans}
    for number in range(_WARM_UP + options.rounds):
        for way, make in plans.items():
            made, hosts, start = make(), [], time.perf_counter()
            for _ in range(options.layers):
                before = time.perf_counter()
                made.run(query, key, value)
                hosts.append(1e3 * (time.perf_counter() - before))
            synchronize()
            if number >= _WARM_UP:
                found[way].append((statistics.median(hosts[_FIRST:]), 1e3 * (time.perf_counter() - start)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("it needs a GPU: elsewhere no launch is replayed")
    rows = [["way", "host per layer, ms", "least", "most", f"{options.layers} layers with the device, ms"]]
    for way, each in measure(options).items():
        hosts = [host for host, _ in each]
        figures = (statistics.median(hosts), min(hosts), max(hosts), statistics.median(whole for _, whole in each))
        rows.append([way, *(f"{figure:.2f}" for figure in figures)])
    print(f"{device_name()}, torch {torch.__version__}", text_table(rows, "<>>>>"), sep="\n")


if __name__ == "__main__":
    main()
