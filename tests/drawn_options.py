"""Options of a call that hypothesis draws: paddings, offsets, scale, soft cap and window."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

PADDINGS = ("none", "left", "right", "holes", "all")


@st.composite
def attention_masks(draw: st.DrawFn, batch: int, kv_len: int) -> Tensor | None:
    """Left, right, with holes, or a whole row of padding; bool or integer; half the time none."""
    if draw(st.booleans()):
        return None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = []
    for _ in range(batch):
        slot, length = torch.arange(kv_len), draw(st.integers(0, kv_len))
        kept = draw(st.sampled_from([0.1, 0.5, 0.9]))
        row = {
            "none": slot >= 0,
            "left": slot >= length,
            "right": slot < length,
            "holes": torch.rand(kv_len, generator=generator) < kept,
            "all": slot < 0,
        }[draw(st.sampled_from(PADDINGS))]
        rows.append(row)
    return torch.stack(rows).to(draw(st.sampled_from([torch.bool, torch.int64, torch.uint8])))


def q_offsets(batch: int, largest: int) -> st.SearchStrategy[int | Tensor | None]:
    """None (half the time), an int, a 0-d tensor or one per batch row; tensors may leave the range."""
    ints = st.integers(0, largest)
    loose = st.integers(-3, largest + 3)
    tensors = loose.map(torch.tensor) | st.lists(loose, min_size=batch, max_size=batch).map(torch.tensor)
    offsets: st.SearchStrategy[int | Tensor | None] = st.none() | st.none() | ints | tensors
    return offsets


def score_options(kv_len: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "scale": st.sampled_from([0.05, 0.2]),
            "softcap": st.sampled_from([2.0, 20.0]),
            "window": st.integers(2, kv_len + 5),  # with a window of 1 every block is a tie
        },
    )
