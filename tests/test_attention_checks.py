"""Refusals of attention: values, backends, and calls that a CPU cannot run."""

import re

import pytest
import torch

from flexmask._torch import HAS_CPU_KERNEL
from tests.attention_calls import flexprefill_attention
from tests.refusals import LAYOUT, Refusals, ids, right, zeros

REFUSED_BY_ATTENTION: Refusals = [
    ({"value": zeros(2, 96, 32)}, ValueError, f"value must be {LAYOUT['value']}; got shape (2, 96, 32)"),
    ({"value": None}, TypeError, f"value must be a tensor {LAYOUT['value']}; got NoneType"),
    ({"value": zeros(2, 2, 96, 0)}, ValueError, "value must not be empty; got shape (2, 2, 96, 0)"),
    *(
        (
            {"value": zeros(*shape)},
            ValueError,
            f"value must have key's batch, num_kv_heads and kv_len (2, 2, 96); got {shape[:3]}",
        )
        for shape in ((1, 2, 96, 32), (2, 4, 96, 32), (2, 2, 64, 32))
    ),
    *(
        ({"value": zeros(2, 2, 96, size)}, ValueError, f"value must have a v_head_dim from 16 to 512; got {size}")
        for size in (8, 513)
    ),
    # key has query's dtype and device, so one name stands for both
    (
        {"value": zeros(2, 2, 96, 48, dtype=torch.float16)},
        TypeError,
        "value must have query's dtype torch.float32; got torch.float16",
    ),
    ({"value": zeros(2, 2, 96, 48, device="meta")}, ValueError, "value must be on query's device cpu; got meta"),
    ({"backend": "cuda"}, ValueError, "backend must be one of 'auto', 'triton', 'flash'; got 'cuda'"),
    ({"backend": None}, ValueError, "backend must be one of 'auto', 'triton', 'flash'; got None"),
    ({"dense_below": -1}, ValueError, "dense_below must be >= 0 tokens; got -1"),
    ({"dense_below": 1.0}, TypeError, "dense_below must be an int; got float"),
    *(
        ({"backend": "triton", "dense_below": n}, ValueError, 'backend="triton" needs a GPU; on a CPU use backend="auto"')
        for n in (0, 16384)
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED_BY_ATTENTION, ids=ids(REFUSED_BY_ATTENTION))
def test_attention_refuses(changes, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        flexprefill_attention(**{**right(), **changes})


@pytest.mark.parametrize("reason", ["a CUDA device (got cpu)", "float16 or bfloat16 (got float32)"])
def test_flash_names_every_reason_why_it_cannot_run(reason):
    with pytest.raises(ValueError, match='^backend="flash" cannot run here: .*' + re.escape(reason)):
        flexprefill_attention(**right(), backend="flash", dense_below=0)


@pytest.mark.skipif(HAS_CPU_KERNEL, reason="this torch has a kernel; `make test-versions` runs one that has not")
def test_a_cpu_is_refused_where_torch_has_no_kernel_for_it():
    with pytest.raises(NotImplementedError, match=r"FlexAttention runs on CPUs from torch 2\.6 on; got torch .* dense_below"):
        flexprefill_attention(**right(), dense_below=0)
    assert flexprefill_attention(**right()).shape == (2, 4, 64, 48)
