"""Packed sequences for tests, and attention to one sequence at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flexmask._torch import CPU_TAKES_UNBACKED_SIZES
from flexmask.base.inputs import attention_inputs
from flexmask.flex.packed import attention_in_one_call
from flexmask.varlen import segments_of
from tests.attention_calls import flexprefill_attention
from tests.cases import structured_inputs
from tests.comparisons import TOLERANCES

SPARSE: dict[str, Any] = {"gamma": 0.6, "tau": 0.1, "block_size": 32, "min_budget": 0}
# a sequence without rows, an empty one, a single row and a chunk among them
Q_LENS = (300, 40, 0, 300, 0, 1, 150, 90)
K_LENS = (300, 40, 50, 300, 0, 77, 333, 97)
LONG = 256  # dense below this


def bounds_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


def pack(q_lens=Q_LENS, k_lens=K_LENS, heads=(4, 2), head_dims=(32, 24), seed=0):
    """Query, key and value of structured sequences, and their bounds."""
    generator = torch.Generator().manual_seed(seed)
    parts = [[], [], []]
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        query, key = structured_inputs(generator, 1, *heads, max(q_len, 1), max(k_len, 1), head_dims[0])
        value = torch.randn(1, heads[1], k_len, head_dims[1], generator=generator)
        for part, x in zip(parts, (query[:, :, :q_len], key[:, :, :k_len], value), strict=True):
            part.append(x[0].transpose(0, 1))
    return [torch.cat(part).contiguous() for part in parts], bounds_of(q_lens), bounds_of(k_lens)


def alone(inputs: list[Tensor], q_bounds: list[int], k_bounds: list[int], **keywords: Any) -> list[Any]:
    """flexprefill_attention of each sequence, None for one without rows."""
    query, key, value = (x.transpose(0, 1)[None] for x in inputs)
    results = []
    for i in range(len(q_bounds) - 1):
        rows, keys = slice(q_bounds[i], q_bounds[i + 1]), slice(k_bounds[i], k_bounds[i + 1])
        given = (query[:, :, rows], key[:, :, keys], value[:, :, keys])
        results.append(flexprefill_attention(*given, **keywords) if rows.stop > rows.start else None)
    return results


def assert_close(out: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def one_call(inputs: list[Tensor], q_bounds: list[int], k_bounds: list[int], **scores: Any) -> Tensor:
    """Dense attention of all sequences by one FlexAttention call, as on GPUs."""
    if not (inputs[0].is_cuda or CPU_TAKES_UNBACKED_SIZES):
        pytest.skip("this torch's C++ template miscompiles a mask of tensors of many sizes; on CPUs no call of ours needs it")
    given = attention_inputs(*(x.transpose(0, 1)[None] for x in inputs), **scores)
    segments = [each for each in segments_of(q_bounds, k_bounds, len(inputs[0]), len(inputs[1])) if each.q_len]
    kernel = "triton" if inputs[0].is_cuda else "cpu"
    return torch.cat([out for out, _ in attention_in_one_call(given, segments, kernel)], 2)[0].transpose(0, 1)
