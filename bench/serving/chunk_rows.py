"""From how many rows on a later chunk gains by running sparse: ``python -m bench.serving.chunk_rows --csv FILE``.

One layer of the 8B shape, chunks of `rows` behind `before` cached tokens. A row of the file gives milliseconds: ``stock`` is one
call of the engine's kernel over the paged cache, ``plug_in`` all that the plug-in does instead; ``gather`` and ``select`` are
parts of it. ``stock_kernels`` and ``plug_in_kernels`` sum up the GPU's kernels without the launches, most of which an engine
hides behind its linear layers. ``stock_kernel`` is the first that runs of FlashAttention 3 from vLLM, FlashAttention 4, and
FlexAttention over every block; the last two read keys gathered before. The program ends with the least rows that gain, by length.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import ON_GPU
from bench.rows import Row, Sheet
from bench.serving.prefill_profile import BLOCK, HYBRID, own_density
from bench.speed.clock import device_name, in_turns, kernels_of
from flexmask import run_method
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks.hybrid import NEAREST
from flexmask.integrations.serving.attend import attend
from flexmask.integrations.serving.keys import after_cached
from flexmask.integrations.serving.layers import LayerShape, SparseLayer, role_of_shape
from flexmask.integrations.vllm.pages import PageTable, gathered
from flexmask.select import select_blocks
from flexmask.settings import PrefillSettings

IDENTITY = ("rows", "before", "selection", "stock_kernel", "device", "torch")
TIMES = ("stock", "plug_in", "gather", "select")
COLUMNS = (*IDENTITY, "density", *TIMES, "stock_kernels", "plug_in_kernels")
SHAPE = LayerShape(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, scale=128**-0.5)
PAGE = 16
Call = Callable[[], Tensor]


class Chunk:
    """A chunk of random rows behind cached tokens, in an engine's layout."""

    def __init__(self, rows: int, before: int, device: str, shape: LayerShape = SHAPE) -> None:
        self.rows, self.tokens, self.shape = rows, before + rows, shape
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        random = torch.Generator(device).manual_seed(0)
        heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
        pages = -(-self.tokens // PAGE)
        # vLLM's order in memory, its pages in any order
        self.cache = torch.randn(pages, PAGE, kv_heads, 2 * width, dtype=dtype, device=device, generator=random).transpose(1, 2)
        self.table = torch.randperm(pages, device=device, generator=random).int()
        self.query = torch.randn(rows, heads, width, dtype=dtype, device=device, generator=random)
        # the cache holds the chunk's rows too
        own = gathered(self.cache, PageTable(self.table, self.tokens), width)
        self.key, self.value = (each[:, before:].transpose(0, 1).contiguous() for each in own)
        self.page_table = PageTable(self.table, before)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """As the plug-in gathers them."""
        cached = gathered(self.cache, self.page_table, self.shape.head_dim)
        return after_cached(cached[0], self.key), after_cached(cached[1], self.value)

    def layer(self, **settings: Any) -> SparseLayer:
        """A sparse layer of this shape."""
        role = role_of_shape(self.shape, 0, PrefillSettings(**settings, dense_below=0))
        assert isinstance(role, SparseLayer)
        return role


def flash_attention_3(chunk: Chunk) -> Call:
    """As vLLM 0.26 calls it."""
    function = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    key, value = chunk.cache.transpose(1, 2).split(chunk.shape.head_dim, -1)
    device = chunk.query.device
    starts = torch.tensor([0, chunk.rows], dtype=torch.int32, device=device)
    lengths = torch.tensor([chunk.tokens], dtype=torch.int32, device=device)
    out, table = torch.empty_like(chunk.query), chunk.table[None]
    given = {"cu_seqlens_q": starts, "max_seqlen_q": chunk.rows, "seqused_k": lengths, "max_seqlen_k": chunk.tokens}
    given |= {"softmax_scale": chunk.shape.scale, "causal": True, "block_table": table, "fa_version": 3, "out": out}

    def call() -> Tensor:
        function(q=chunk.query, k=key, v=value, **given)
        return out

    return call


def flash_attention_4(chunk: Chunk) -> Call:
    """Of flash-attn-4, over keys that are not paged."""
    function = importlib.import_module("flash_attn.cute").flash_attn_func
    query, key, value = (x[None] for x in (chunk.query, *(each.transpose(0, 1).contiguous() for each in chunk.keys_and_values())))

    def call() -> Tensor:
        found = function(query, key, value, softmax_scale=chunk.shape.scale, causal=True)
        out: Tensor = (found[0] if isinstance(found, tuple) else found)[0]
        return out

    return call


def every_block(chunk: Chunk) -> Call:
    """FlexAttention under a mask that keeps every block, over gathered keys."""
    layer, (key, value) = chunk.layer(method="causal"), chunk.keys_and_values()
    return lambda: attend(layer, chunk.query, key, value)[0]


STOCK = {"FlashAttention 3": flash_attention_3, "FlashAttention 4": flash_attention_4, "FlexAttention": every_block}


def stock_call(chunk: Chunk, expected: Tensor) -> tuple[str, Call]:
    """The first stock kernel that runs, and its name. RuntimeError if it computes something else."""
    for name, make in STOCK.items():
        try:
            call = make(chunk)
            out = call()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        if (out.float() - expected.float()).abs().max() > 0.05:
            raise RuntimeError(f"{name} computes another attention")
        return name, call
    raise RuntimeError("no stock kernel runs")


def budget(rows: int, tokens: int) -> int:
    """Hybrid's `min_budget` that keeps as much of a chunk of random keys, which are all alike, as hybrid keeps of text."""
    number, wanted = rows / BLOCK, own_density(tokens) * tokens / BLOCK
    # each row of blocks keeps the nearest ones and the first, the last row more of the nearest
    return max(1, round(number * (wanted - 1) / (number - 1 + NEAREST))) * BLOCK


def measured(rows: int, before: int, device: str, shape: LayerShape = SHAPE) -> Row:
    """One row."""
    chunk = Chunk(rows, before, device, shape)
    layer = chunk.layer(method=HYBRID, gamma=0.1, min_coverage=0.0, min_budget=budget(rows, chunk.tokens))
    name, stock = stock_call(chunk, every_block(chunk)())
    key, value = chunk.keys_and_values()
    inputs = attention_inputs(chunk.query.transpose(0, 1)[None], key[None], value[None]).with_offset()
    selector = layer.selector.for_inputs(inputs)
    density = attend(layer, chunk.query, key, value, None, True)[1]
    assert density is not None
    calls: dict[str, Callable[[], Any]] = {
        "stock": stock,
        "plug_in": lambda: attend(layer, chunk.query, *chunk.keys_and_values(), None, True),
        "gather": chunk.keys_and_values,
        "select": lambda: select_blocks(selector, inputs),
    }
    row: Row = {"rows": rows, "before": before, "stock_kernel": name, "density": density.item()}
    for each, found in in_turns(calls).items():
        if isinstance(found, str):
            raise SystemExit(f"{each}: {found}")
        row[each] = found
    for each in ("stock", "plug_in") if device == "cuda" else ():
        row[f"{each}_kernels"] = sum(microseconds for _, microseconds in kernels_of(calls[each])) / 1e3
    return row


def least_rows(found: Sequence[Row]) -> Iterator[str]:
    """By length: the rows at which the plug-in takes as long as the stock kernel, between two measured numbers."""
    for before in sorted({row["before"] for row in found}):
        own = sorted((row for row in found if row["before"] == before), key=lambda row: row["rows"])
        gains = [(row["rows"], row["stock"] / row["plug_in"]) for row in own]
        told = ", ".join(f"{rows} rows {gain:.2f}x" for rows, gain in gains)
        below = [pair for pair in gains if pair[1] < 1]
        above = [pair for pair in gains if pair[1] >= 1 and (not below or pair[0] > below[-1][0])]
        line = f"behind {before:,} tokens: {told}; "
        if below and above:
            (low, slow), (high, fast) = below[-1], above[0]
            even = round(low + (high - low) * (1 - slow) / (fast - slow))
            yield line + f"even at about {even} rows"
        else:
            yield line + ("all gain" if above else "none gains")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows, before = ([128, 512, 2048, 8192], [16384, 65536, 131072]) if ON_GPU else ([128, 256], [512])
    parser.add_argument("--rows", type=int, nargs="+", default=rows, help="rows of a chunk")
    parser.add_argument("--before", type=int, nargs="+", default=before, help="cached tokens before it")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument(
        "--uncompiled", action="store_true", help="run the selection uncompiled: seconds per row, for its kernels"
    )
    options = parser.parse_args(arguments)
    if options.uncompiled:
        vars(run_method)["run_compiled"] = lambda function, variant, inputs, *rest: function(inputs, *rest)
    sheet, found = Sheet(options.csv, COLUMNS, IDENTITY), []
    for tokens in options.before:
        for number in options.rows:
            with torch.inference_mode():
                row = measured(number, tokens, "cuda" if ON_GPU else "cpu")
            row["selection"] = "uncompiled" if options.uncompiled else "compiled"
            sheet.add(**row, device=device_name(), torch=torch.__version__)
            found.append(row)
            print(row, flush=True)
    for line in least_rows(found):
        print(line)


if __name__ == "__main__":
    main()
