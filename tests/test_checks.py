"""Wrong arguments are refused by name; the ends of ranges are accepted."""

import functools
import math
import re

import pytest
import torch

from flexmask import flexprefill_mask, sparse_attention
from flexmask._torch import HAS_CPU_KERNEL
from flexmask.block_masks import published_mask
from tests.attention_calls import flexprefill_attention
from tests.comparisons import known_lengths
from tests.refusals import LAYOUT, Refusals, ids, refused_values, right, zeros

WHOLE_PROMPT = "method 'published' needs a whole prompt of a multiple of block_size (32) tokens; got q_len {} and kv_len {}"
NO_OTHER = "method 'published' takes no {}; use method 'flexprefill'"

NUMBERS = ("scale", "softcap")
QUERY, KEY = (2, 4, 64, 32), (2, 2, 96, 32)

REFUSED: Refusals = [
    # ranks and types
    ({"query": zeros(4, 64, 32)}, ValueError, f"query must be {LAYOUT['query']}; got shape (4, 64, 32)"),
    ({"key": zeros(2, 96, 32)}, ValueError, f"key must be {LAYOUT['key']}; got shape (2, 96, 32)"),
    ({"query": None}, TypeError, f"query must be a tensor {LAYOUT['query']}; got NoneType"),
    ({"key": [[1.0]]}, TypeError, f"key must be a tensor {LAYOUT['key']}; got list"),
    # sizes
    ({"query": zeros(0, 4, 64, 32)}, ValueError, "query must not be empty; got shape (0, 4, 64, 32)"),
    ({"key": zeros(2, 0, 96, 32)}, ValueError, "key must not be empty; got shape (2, 0, 96, 32)"),
    ({"key": zeros(3, 2, 96, 32)}, ValueError, "key must have query's batch size 2; got 3"),
    ({"key": zeros(2, 2, 96, 64)}, ValueError, "key must have query's head_dim 32; got 64"),
    ({"key": zeros(2, 3, 96, 32)}, ValueError, "query's num_heads must be a multiple of key's num_kv_heads 3; got 4"),
    ({"query": zeros(2, 4, 97, 32)}, ValueError, "query's q_len must be at most key's kv_len 96; got 97"),
    *(
        (
            {"query": zeros(2, 4, 64, n), "key": zeros(2, 2, 96, n)}, ValueError,
            f"query must have a head_dim from 16 to 512; got {n}",
        )
        for n in (15, 513)
    ),
    # dtypes and devices
    *refused_values(
        TypeError, "query must be float32, float16 or bfloat16; got {dtype}", ("query",),
        [zeros(*QUERY, dtype=dtype) for dtype in (torch.float64, torch.int64, torch.complex64)],
    ),
    ({"key": zeros(*KEY).half()}, TypeError, "key must have query's dtype torch.float32; got torch.float16"),
    ({"key": zeros(*KEY, device="meta")}, ValueError, "key must be on query's device cpu; got meta"),
    (
        {"query": zeros(*QUERY, device="meta"), "key": zeros(*KEY, device="meta")}, ValueError,
        "query must hold values; got a tensor on the meta device",
    ),
    # scores
    *refused_values(ValueError, "{name} must be > 0; got {got}", NUMBERS, (0, 0.0, -1.5)),
    *refused_values(ValueError, "{name} must be finite; got {got}", NUMBERS, (math.nan, math.inf, -math.inf)),
    *refused_values(TypeError, "{name} must be a number; got {type}", NUMBERS, ("1", True, torch.tensor(1.0))),
    *refused_values(ValueError, "window must be >= 1 token (the row's own position counts); got {got}", ("window",), (0, -1)),
    *refused_values(TypeError, "window must be an int; got {type}", ("window",), (64.0, True, torch.tensor(64))),
    ({"window": 2**70}, ValueError, f"window must be < 2**63 tokens; got {2**70}"),
    ({"scale": 10**400}, ValueError, "scale must be a number that a float can hold; got one of 401 digits"),
    # attention_mask
    *refused_values(
        ValueError, "attention_mask must be (batch, kv_len) = (2, 96); got {shape}", ("attention_mask",),
        [torch.ones(shape, dtype=torch.bool) for shape in ((96,), (2, 64), (2, 1, 64, 96))],
    ),
    *refused_values(
        TypeError, "attention_mask must be bool or integer, 1 = token; got {dtype}", ("attention_mask",),
        [torch.ones(2, 96, dtype=dtype) for dtype in (torch.float32, torch.complex64)],
    ),
    ({"attention_mask": [[1] * 96] * 2}, TypeError, "attention_mask must be a tensor or None; got list"),
    ({"attention_mask": zeros(2, 96, device="meta").bool()}, ValueError, "attention_mask must be on key's device cpu; got meta"),
    # q_offset
    *refused_values(ValueError, "q_offset must be in [0, kv_len - q_len = 32]; got {got}", ("q_offset",), (-1, 33, 10**12)),
    *refused_values(TypeError, "q_offset must be an int; got {type}", ("q_offset",), (1.0, True, "0", [0, 1])),
    *refused_values(
        ValueError, "q_offset must be a 0-d or (2,) tensor; got shape {shape}", ("q_offset",),
        [torch.zeros(shape, dtype=torch.int64) for shape in ((1,), (3,), (2, 1))],
    ),
    *refused_values(
        TypeError, "q_offset must be an integer tensor; got {dtype}", ("q_offset",),
        [torch.zeros(2, dtype=dtype) for dtype in (torch.float32, torch.bool, torch.complex64)],
    ),
    ({"q_offset": torch.zeros(2, device="meta").long()}, ValueError, "q_offset must be on key's device cpu; got meta"),
    # gamma by head; tests/test_method.py has the other options
    *(
        ({"gamma": [0.5] * n}, ValueError, f"gamma must hold one number for each of query's 4 heads; got {n} numbers")
        for n in (1, 3, 8)
    ),
    ({"gamma": (0.5, 0.5, 2.0, 0.5)}, ValueError, "gamma[2] must be in (0, 1]; got 2.0"),
    *refused_values(
        ValueError, "gamma must be (num_heads,) = (4,); got {shape}", ("gamma",),
        [zeros(*shape) for shape in ((), (1,), (2,), (2, 4), (4, 1))],
    ),
    *refused_values(
        TypeError, "gamma must be floating; got {dtype}", ("gamma",),
        [zeros(4, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.complex64)],
    ),
    ({"gamma": zeros(4, device="meta")}, ValueError, "gamma must hold values; got a tensor on the meta device"),
    ({"tau": 1.1}, ValueError, "tau must be in [0, 1]; got 1.1"),
    ({"block_size": 100}, ValueError, "block_size must be a multiple of 16 from 16 to 256; got 100"),
]  # fmt: skip
# what the published code cannot do
PUBLISHED: Refusals = [
    ({}, ValueError, WHOLE_PROMPT.format(64, 96)),
    (
        {"query": zeros(2, 4, 95, 32), "key": zeros(2, 2, 95, 32), "value": zeros(2, 2, 95, 48)},
        ValueError,
        WHOLE_PROMPT.format(95, 95),
    ),
    ({"softcap": 30.0}, ValueError, NO_OTHER.format("softcap")),
    ({"window": 64}, ValueError, NO_OTHER.format("window")),
    ({"attention_mask": torch.ones(2, 96, dtype=torch.bool)}, ValueError, NO_OTHER.format("attention_mask")),
    ({"query": zeros(2, 4, 96, 32), "q_offset": 0}, ValueError, NO_OTHER.format("q_offset")),
]


@pytest.mark.parametrize(
    ("method", "changes", "error", "message"),
    [*(("flexprefill", *each) for each in REFUSED), *(("published", *each) for each in PUBLISHED)],
    ids=[*ids(REFUSED), *ids(PUBLISHED)],
)
@pytest.mark.parametrize("attends", [False, True], ids=["mask", "attention"])
def test_mask_and_attention_refuse(attends, method, changes, error, message):
    arguments = {**right(), **changes}
    if not attends:
        del arguments["value"]
    make = {"flexprefill": flexprefill_mask, "published": published_mask}[method]
    call = functools.partial(sparse_attention, method=method) if attends else make
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(**arguments)


@pytest.mark.parametrize(
    "changes",
    [
        {"q_offset": 0, "window": 2**63 - 1, "scale": 1, "softcap": 1e-3, "gamma": [1e-9, 0.5, 1, 1.0]},
        {"q_offset": 32, "window": 1},
        {"q_offset": torch.tensor([5, 6], dtype=torch.int32)},
        *({"gamma": torch.full((4,), 0.5, dtype=dtype)} for dtype in (torch.float64, torch.float32, torch.bfloat16)),
        *({"attention_mask": torch.ones(2, 96, dtype=dtype)} for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64)),
        {"query": zeros(2, 4, 1, 16), "key": zeros(2, 1, 1, 16)},
        *({"query": zeros(2, 4, 96, head_dim), "key": zeros(2, 4, 96, head_dim)} for head_dim in (256, 512)),
    ],
    ids=lambda changes: ids([(changes, ValueError, "")])[0],
)
def test_ends_of_the_ranges_are_accepted(changes):
    arguments = {**right(), **changes}
    del arguments["value"]
    batch, num_heads, q_len, _ = arguments["query"].shape
    shape = (batch, num_heads, *known_lengths(q_len, arguments["key"].shape[2], 32))
    assert flexprefill_mask(**arguments, min_budget=0).shape == shape


REFUSED_BY_ATTENTION: Refusals = [
    ({"value": zeros(2, 96, 32)}, ValueError, f"value must be {LAYOUT['value']}; got shape (2, 96, 32)"),
    ({"value": None}, TypeError, f"value must be a tensor {LAYOUT['value']}; got NoneType"),
    ({"value": zeros(2, 2, 96, 0)}, ValueError, "value must not be empty; got shape (2, 2, 96, 0)"),
    *refused_values(
        ValueError, "value must have key's batch, num_kv_heads and kv_len (2, 2, 96); got {sizes}", ("value",),
        (zeros(1, 2, 96, 32), zeros(2, 4, 96, 32), zeros(2, 2, 64, 32)),
    ),
    *(({"value": zeros(2, 2, 96, n)}, ValueError, f"value must have a v_head_dim from 16 to 512; got {n}") for n in (8, 513)),
    # key has query's dtype and device, so one name stands for both
    (
        {"value": zeros(2, 2, 96, 48, dtype=torch.float16)}, TypeError,
        "value must have query's dtype torch.float32; got torch.float16",
    ),
    ({"value": zeros(2, 2, 96, 48, device="meta")}, ValueError, "value must be on query's device cpu; got meta"),
    *refused_values(TypeError, "{name} must be True or False; got {got!r}", ("return_lse", "return_stats"), ("no", 1, None)),
    ({"backend": "cuda"}, ValueError, "backend must be one of 'auto', 'triton', 'flash'; got 'cuda'"),
    ({"backend": None}, ValueError, "backend must be one of 'auto', 'triton', 'flash'; got None"),
    ({"dense_below": -1}, ValueError, "dense_below must be >= 0 tokens; got -1"),
    ({"dense_below": 1.0}, TypeError, "dense_below must be an int; got float"),
    *refused_values(ValueError, "max_mask_bytes must be > 0 bytes; got {got}", ("max_mask_bytes",), (0, -1)),
    *refused_values(TypeError, "max_mask_bytes must be an int; got {type}", ("max_mask_bytes",), (1.5, True)),
    *refused_values(ValueError, "sinks must be (num_heads,) = (4,); got {shape}", ("sinks",), (zeros(3), zeros(2, 4))),
    ({"sinks": zeros(4, dtype=torch.int64)}, TypeError, "sinks must be floating; got torch.int64"),
    ({"sinks": zeros(4, device="meta")}, ValueError, "sinks must be on query's device cpu; got meta"),
    ({"sinks": [0.0] * 4}, TypeError, "sinks must be a tensor or None; got list"),
    ({"backend": "triton"}, ValueError, 'backend="triton" needs a GPU; on a CPU use backend="auto"'),
    (
        {"backend": "flash"}, ValueError,
        'backend="flash" cannot run here: it needs a CUDA device (got cpu); it needs float16 or bfloat16 (got float32)',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED_BY_ATTENTION, ids=ids(REFUSED_BY_ATTENTION))
def test_attention_refuses(changes, error, message):
    for options in ({}, {"dense_below": 0}):
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            flexprefill_attention(**{**right(), **options, **changes})


@pytest.mark.skipif(HAS_CPU_KERNEL, reason="this torch has a kernel; `make test-versions` runs one that has not")
def test_sparse_attention_is_refused_where_torch_has_no_kernel_for_cpus():
    with pytest.raises(NotImplementedError, match=r"FlexAttention runs on CPUs from torch 2\.6 on; got torch .* dense_below"):
        flexprefill_attention(**right(), dense_below=0)
    assert flexprefill_attention(**right()).shape == (2, 4, 64, 48)
