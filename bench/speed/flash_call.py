"""Host and GPU time of one FLASH call, through FlexAttention and called directly: ``python -m bench.speed.flash_call``.

It needs a Hopper GPU and flash-attn-4. Lists are made once; through FlexAttention each call makes its mask of them. Calls
whose last rows keep every block run at once and, as `hybrid` runs them, with these rows in parts of the keys.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from torch import Tensor

from bench.speed.clock import Call, synchronize, version
from bench.tables import text_table
from flexmask.base.inputs import AttentionInputs, PositionedInputs
from flexmask.base.selection import Selection, block_lists
from flexmask.base.visibility import block_visibility
from flexmask.flex.block_mask import block_mask
from flexmask.flex.flash import flash_attention
from flexmask.flex.last_rows import last_rows_in_parts
from flexmask.flex.run import run_flex_attention

_BLOCK = 128


def problem(options: argparse.Namespace, window: int | None) -> tuple[AttentionInputs, Selection, Selection]:
    """A chunk of bfloat16 rows, tokens first as in engines, random blocks, and these with last rows that keep every block."""
    heads, kv_heads, dim, device = options.heads, options.kv_heads, options.head_dim, options.device
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    query = normal(options.rows, heads, dim).transpose(0, 1)[None]
    key, value = (normal(1, kv_heads, options.keys, dim) for _ in range(2))
    inputs = AttentionInputs(query, key, value, dim**-0.5, window=window)
    seen = block_visibility(inputs.with_offset().tokens(), _BLOCK, window)
    kept = torch.rand(1, heads, *seen.visible.shape[1:], generator=generator, device=device) < options.density
    own = torch.arange(seen.visible.shape[2], device=device) == seen.last_row_block[..., None]
    is_last = torch.arange(seen.visible.shape[1], device=device)[:, None] >= max(0, options.rows // _BLOCK - 1)
    sparse, last_dense = (
        Selection(block_lists((kept | more) & seen.visible[:, None], seen.full), None, {}, _BLOCK)
        for more in (own[:, None], own[:, None] | is_last)
    )
    return inputs, sparse, last_dense


def through_flex_attention(inputs: PositionedInputs, selection: Selection) -> tuple[Tensor, Tensor | None]:
    return run_flex_attention(inputs, block_mask(inputs, selection), "flash")


def host_ms(call: Call, rounds: int = 4, calls: int = 50) -> float:
    """The fastest round's milliseconds until a call has launched; the device is waited for between rounds."""
    times = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * min(times)


def device_ms(call: Call, calls: int = 20) -> float:
    """Milliseconds of a call on the device, whose queue is full."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(1e8))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    synchronize()
    return float(begin.elapsed_time(end)) / calls


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 8192, "keys": 32768, "heads": 12, "kv-heads": 2, "head-dim": 128, "window": 3072}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    parser.add_argument("--density", type=float, default=0.15, help="share of the visible blocks (0.15)")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("flash_call needs a Hopper GPU")
    options.device = torch.device("cuda", torch.cuda.current_device())
    rows = [["call", "way", "host ms", "device ms", "largest difference"]]
    for window in (None, options.window):
        inputs, selection, last_dense = problem(options, window)
        pairs: list[dict[str, Call]] = [
            {
                "through FlexAttention": partial(through_flex_attention, inputs.with_offset(), selection),
                "called directly": partial(flash_attention, inputs, selection.lists, _BLOCK),
            }
        ]
        last = None if window else last_rows_in_parts(inputs, _BLOCK)
        if last is not None:
            pairs.append(
                {
                    "last rows dense": partial(flash_attention, inputs, last_dense.lists, _BLOCK),
                    f"last rows in {last.parts} parts": partial(
                        flash_attention, inputs, last_dense.lists, _BLOCK, last_rows=last
                    ),
                }
            )
        for ways in pairs:
            one, other = (call()[0] for call in ways.values())
            difference = f"{float((one - other).abs().max()):.2g}"
            for way, call in ways.items():
                call()
                rows.append([f"window {window}", way, f"{host_ms(call):.3f}", f"{device_ms(call):.3f}", difference])
    print(f"torch {torch.__version__}, flash-attn-4 {version('flash-attn-4')}, {torch.cuda.get_device_name()}")
    print(text_table(rows, "<<>>>"))


if __name__ == "__main__":
    main()
