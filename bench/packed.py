"""Dense attention of packed sequences on a CPU: SDPA sequence by sequence, and one FlexAttention call for all.

``python -m bench.packed`` prints seconds of CPU time on one thread, the least of five rounds taken in turns: time on the clock
would count whatever else the machine does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from flexmask.base.inputs import attention_inputs
from flexmask.flex.packed import Segment, attention_in_one_call, dense_attention_packed

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
PACKS = {
    "256 of 64": [64] * 256,
    "64 of 200 to 300": [200 + 100 * i // 64 for i in range(64)],
    "16 of 1,000": [1000] * 16,
    "4 of 4,000": [4000] * 4,
}


def ways(lengths: list[int], dtype: torch.dtype) -> dict[str, Callable[[], list[Tensor]]]:
    """The two ways for one pack of random sequences; each gives the outputs, (1, num_heads, length, head_dim)."""
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    query, key, value = (torch.randn(bounds[-1], heads, HEAD_DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    inputs = attention_inputs(*(x.transpose(0, 1)[None] for x in (query, key, value)))
    slices = [slice(start, end) for start, end in itertools.pairwise(bounds)]
    segments = [Segment(each, each) for each in slices]
    return {
        "SDPA a sequence": lambda: [out for out, _ in dense_attention_packed(inputs, segments)],
        "one FlexAttention call": lambda: [out for out, _ in attention_in_one_call(inputs, segments, "cpu")],
    }


def measured(lengths: list[int], dtype: torch.dtype) -> dict[str, float]:
    """CPU seconds of each way."""
    runs = ways(lengths, dtype)
    found = dict.fromkeys(runs, float("inf"))
    for out, twin in zip(*(run() for run in runs.values()), strict=True):
        torch.testing.assert_close(out, twin, atol=2e-2, rtol=2e-2)
    for _ in range(5):
        for name, run in runs.items():
            start = time.process_time()
            run()
            found[name] = min(found[name], time.process_time() - start)
    return found


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {HEADS} heads over {KV_HEADS} key heads of {HEAD_DIM}, one thread, ms")
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            for name, lengths in PACKS.items():
                row = {way: f"{1e3 * seconds:.0f}" for way, seconds in measured(lengths, dtype).items()}
                print(f"{str(dtype).removeprefix('torch.')}, {name}: {row}")


if __name__ == "__main__":
    main()
