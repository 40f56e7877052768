"""What one mask for the query heads of a key head costs in density and gains in time: ``python -m bench.sharing --tokens 32768``.

One table with a row for each value of ``share_kv_heads``. The methods of all rows take turns, as in the other parts; on a GPU
times are of plain calls and, in brackets, of CUDA graph replays.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from bench import methods
from bench.calibration import calibrated_prompt
from bench.captured import LAYERS, retriever_prompt
from bench.inputs import ALL_TOPICS, RECIPES, structured_prompt
from bench.markdown import ms, share, table, times
from bench.measure import wall_and_graph
from bench.methods import BACKENDS, DENSE, Tensors
from bench.prompts import DEFAULT_FLOOR, GAMMA, ON_GPU, SHAPE, floor_of, named_density
from bench.rows import device_name
from flexmask import FlexPrefillConfig, FlexPrefillStats, flexprefill_attention, flexprefill_mask
from flexmask.config import SHARED_MASKS

_RECIPES = {"mixture": RECIPES, "topics": ALL_TOPICS}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768 if ON_GPU else 8192)
    parser.add_argument("--input", choices=(*_RECIPES, "retriever"), default="mixture", help="see bench/README.md")
    parser.add_argument("--gamma", type=float, default=GAMMA)
    parser.add_argument("--heads", type=int, default=SHAPE["num_heads"], help="query heads")
    parser.add_argument("--kv-heads", type=int, default=SHAPE["num_kv_heads"], help="key heads")
    parser.add_argument("--min-budget", type=int, help="tokens; default as in the other parts")
    parser.add_argument("--aim", type=float, help="amount of structure, instead of looking for that of the named density")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0])
    parser.add_argument("--untimed", action="store_true", help="density and coverage only")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")

    floor = options.min_budget
    if floor is None:
        floor = DEFAULT_FLOOR if options.input == "retriever" else floor_of(options.tokens)
    tensors = _tensors(options, floor)
    configs = {name: FlexPrefillConfig(options.gamma, min_budget=floor, share_kv_heads=name) for name in SHARED_MASKS}
    heads, head_dim = f"{tensors[0].shape[1]}/{tensors[1].shape[1]} heads", tensors[0].shape[3]
    print(
        f"{device_name()}, torch {torch.__version__}: {options.input}, {options.tokens:,} tokens, {heads}, head_dim {head_dim}, "
        f"{tensors[0].dtype}, gamma {options.gamma}, min_budget {floor}",
        flush=True,
    )
    found = {name: kept(tensors, config) for name, config in configs.items()}
    head = ["share_kv_heads", "query-aware", "density", "coverage", "least of a head"]
    rows = [[repr(name), *(share(x) for x in fields)] for name, fields in found.items()]
    if not options.untimed:
        timed = _times(tensors, configs, options.backend)
        dense = timed.pop(DENSE)
        print(f"{DENSE}: {_shown(dense)} ms; kernel and call by backend {options.backend}")
        head += ["mask, ms", "kernel, ms", "call, ms", "dense / call"]
        for row, name in zip(rows, configs, strict=True):
            row += [_shown(timed[f"{what} {name}"]) for what in ("mask", "kernel", "call")]
            row.append(_ratio(dense, timed[f"call {name}"]))
    print("\n".join(table(head, rows)))


def kept(tensors: Tensors, config: FlexPrefillConfig) -> tuple[float, float, float, float]:
    """Share of query-aware heads, mean density, mean coverage and the least coverage of a head."""
    with torch.no_grad():
        _, stats = cast(tuple[BlockMask, FlexPrefillStats], flexprefill_mask(*tensors[:2], config=config, return_stats=True))
    query_aware = float(stats.is_query_aware.float().mean())
    return query_aware, float(stats.density.mean()), float(stats.coverage.mean()), float(stats.coverage.min())


def _tensors(options: argparse.Namespace, floor: int) -> Tensors:
    """Query, key and value of the input."""
    shape: dict[str, Any] = SHAPE | {"num_heads": options.heads, "num_kv_heads": options.kv_heads}
    if options.input == "retriever":
        # as many layers as the heads take, so that none is there twice
        layers = LAYERS[: max(1, options.heads // 8)]
        return retriever_prompt(options.tokens, layers=layers, **shape)
    shape["recipes"] = _RECIPES[options.input]
    if options.aim is not None:
        return structured_prompt(options.tokens, options.aim, **shape)
    say = partial(print, flush=True)
    return calibrated_prompt(
        options.tokens, named_density(options.tokens), gamma=options.gamma, min_budget=floor, log=say, **shape
    ).tensors


def _times(tensors: Tensors, configs: dict[str | None, FlexPrefillConfig], backend: str) -> dict[str, dict[str, Any]]:
    """``wall_and_graph`` of dense attention and of each config's mask, kernel and call."""
    makes: dict[str, Callable[[Tensors], Callable[[], Any]]] = {DENSE: methods.dense_sdpa}
    for name, config in configs.items():
        makes[f"mask {name}"] = partial(_mask, config=config)
        makes[f"kernel {name}"] = partial(_kernel, config=config, backend=backend)
        makes[f"call {name}"] = partial(_call, config=config, backend=backend)
    with torch.no_grad():
        for make in makes.values():
            methods.warm(make, tensors)
        return wall_and_graph({name: make(tensors) for name, make in makes.items()})


def _mask(tensors: Tensors, config: FlexPrefillConfig) -> Callable[[], BlockMask]:
    return lambda: cast(BlockMask, flexprefill_mask(*tensors[:2], config=config))


def _kernel(tensors: Tensors, config: FlexPrefillConfig, backend: str) -> Callable[[], Tensor]:
    return methods.kernel(tensors, _mask(tensors, config)(), backend)


def _call(tensors: Tensors, config: FlexPrefillConfig, backend: str) -> Callable[[], Tensor]:
    backend = "auto" if backend == "cpu" else backend
    return lambda: cast(Tensor, flexprefill_attention(*tensors, config=config, backend=backend, dense_below=0))


def _shown(row: dict[str, Any]) -> str:
    """Milliseconds of plain calls, and of replays in brackets, or the error."""
    if "error" in row:
        return str(row["error"])
    return ms(row["wall_ms"]) + (f" ({ms(row['graph_ms'])})" if "graph_ms" in row else "")


def _ratio(dense: dict[str, Any], call: dict[str, Any]) -> str:
    """Dense attention's time over the call's, by plain calls and, in brackets, by replays."""
    ratios = [times(dense[name] / call[name]) for name in ("wall_ms", "graph_ms") if name in dense and name in call]
    return ratios[0] + "".join(f" ({ratio})" for ratio in ratios[1:]) if ratios else "-"


if __name__ == "__main__":
    main()
