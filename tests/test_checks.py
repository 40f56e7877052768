"""Whatever is wrong with the arguments is refused by name before anything is computed, and without reading a tensor's values."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from flexmask import FlexPrefillConfig, attention, flexprefill_attention, flexprefill_mask
from tests.helpers import known_lengths, structured_inputs

LAYOUT = {
    "query": "(batch, num_heads, q_len, head_dim)",
    "key": "(batch, num_kv_heads, kv_len, head_dim)",
    "value": "(batch, num_kv_heads, kv_len, v_head_dim)",
}
WHOLE_PROMPT = 'selection="reference" needs a whole prompt of a multiple of block_size (32) tokens; got q_len {} and kv_len {}'
SHARES = 'selection="reference" takes no {}; use selection="coverage"'


def right() -> dict[str, Any]:
    """Arguments that are accepted: lengths 64 of 96, 4 heads on 2."""
    return {
        "query": torch.zeros(2, 4, 64, 32),
        "key": torch.zeros(2, 2, 96, 32),
        "value": torch.zeros(2, 2, 96, 48),
        "block_size": 32,
    }


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


# what differs from right(), exception, message
Refusals = list[tuple[dict[str, Any], type[Exception], str]]

REFUSED: Refusals = [
    # ranks
    ({"query": zeros(4, 64, 32)}, ValueError, f"query must be {LAYOUT['query']}; got shape (4, 64, 32)"),
    ({"query": zeros(1, 2, 4, 64, 32)}, ValueError, f"query must be {LAYOUT['query']}; got shape (1, 2, 4, 64, 32)"),
    ({"key": zeros(2, 96, 32)}, ValueError, f"key must be {LAYOUT['key']}; got shape (2, 96, 32)"),
    ({"query": zeros()}, ValueError, f"query must be {LAYOUT['query']}; got shape ()"),
    # no tensors
    ({"query": None}, TypeError, f"query must be a tensor {LAYOUT['query']}; got NoneType"),
    ({"key": [[1.0]]}, TypeError, f"key must be a tensor {LAYOUT['key']}; got list"),
    # empty
    *(
        ({"query": zeros(*shape)}, ValueError, f"query must not be empty; got shape {shape}")
        for shape in ((0, 4, 64, 32), (2, 0, 64, 32), (2, 4, 0, 32), (2, 4, 64, 0))
    ),
    ({"key": zeros(2, 0, 96, 32)}, ValueError, "key must not be empty; got shape (2, 0, 96, 32)"),
    ({"key": zeros(2, 2, 0, 32)}, ValueError, "key must not be empty; got shape (2, 2, 0, 32)"),
    # sizes against each other
    ({"key": zeros(3, 2, 96, 32)}, ValueError, "key must have query's batch size 2; got 3"),
    ({"key": zeros(1, 2, 96, 32)}, ValueError, "key must have query's batch size 2; got 1"),
    ({"key": zeros(2, 2, 96, 64)}, ValueError, "key must have query's head_dim 32; got 64"),
    ({"key": zeros(2, 3, 96, 32)}, ValueError, "query's num_heads must be a multiple of key's num_kv_heads 3; got 4"),
    ({"key": zeros(2, 8, 96, 32)}, ValueError, "query's num_heads must be a multiple of key's num_kv_heads 8; got 4"),
    ({"query": zeros(2, 4, 97, 32)}, ValueError, "query's q_len must be at most key's kv_len 96; got 97"),
    *(
        (
            {"query": zeros(2, 4, 64, size), "key": zeros(2, 2, 96, size)},
            ValueError,
            f"query must have a head_dim from 16 to 256; got {size}",
        )
        for size in (8, 15, 257)
    ),
    # dtypes and devices
    *(
        ({"query": zeros(2, 4, 64, 32, dtype=dtype)}, TypeError, f"query must be float32, float16 or bfloat16; got {dtype}")
        for dtype in (torch.float64, torch.int64, torch.bool, torch.complex64)
    ),
    (
        {"key": zeros(2, 2, 96, 32, dtype=torch.bfloat16)},
        TypeError,
        "key must have query's dtype torch.float32; got torch.bfloat16",
    ),
    ({"key": zeros(2, 2, 96, 32, device="meta")}, ValueError, "key must be on query's device cpu; got meta"),
    # scores
    *(({n: x}, ValueError, f"{n} must be > 0; got {x}") for n in ("scale", "softcap") for x in (0, 0.0, -1.5)),
    *(
        ({n: x}, ValueError, f"{n} must be finite; got {x}")
        for n in ("scale", "softcap")
        for x in (math.nan, math.inf, -math.inf)
    ),
    *(
        ({n: x}, TypeError, f"{n} must be a number; got {type(x).__name__}")
        for n in ("scale", "softcap")
        for x in ("1", True, torch.tensor(1.0))
    ),
    *(({"window": x}, ValueError, f"window must be >= 1 token (the row's own position counts); got {x}") for x in (0, -1)),
    *(({"window": x}, TypeError, f"window must be an int; got {type(x).__name__}") for x in (64.0, True, torch.tensor(64))),
    # attention_mask
    *(
        (
            {"attention_mask": torch.ones(shape, dtype=torch.bool)},
            ValueError,
            f"attention_mask must be (batch, kv_len) = (2, 96); got {shape}",
        )
        for shape in ((96,), (2, 64), (1, 96), (2, 1, 64, 96), ())
    ),
    *(
        (
            {"attention_mask": torch.ones(2, 96, dtype=dtype)},
            TypeError,
            f"attention_mask must be bool or integer, 1 = token; got {dtype}",
        )
        for dtype in (torch.float32, torch.bfloat16, torch.complex64)
    ),
    ({"attention_mask": [[1] * 96] * 2}, TypeError, "attention_mask must be a tensor or None; got list"),
    (
        {"attention_mask": torch.ones(2, 96, dtype=torch.bool, device="meta")},
        ValueError,
        "attention_mask must be on key's device cpu; got meta",
    ),
    # q_offset
    *(({"q_offset": x}, ValueError, f"q_offset must be in [0, kv_len - q_len = 32]; got {x}") for x in (-1, 33, 10**12)),
    *(({"q_offset": x}, TypeError, f"q_offset must be an int; got {type(x).__name__}") for x in (1.0, True, "0", [0, 1])),
    *(
        (
            {"q_offset": torch.zeros(shape, dtype=torch.int64)},
            ValueError,
            f"q_offset must be a 0-d or (2,) tensor; got shape {shape}",
        )
        for shape in ((1,), (3,), (2, 1))
    ),
    *(
        ({"q_offset": torch.zeros(2, dtype=dtype)}, TypeError, f"q_offset must be an integer tensor; got {dtype}")
        for dtype in (torch.float32, torch.bool, torch.complex64)
    ),
    (
        {"q_offset": torch.zeros(2, dtype=torch.int64, device="meta")},
        ValueError,
        "q_offset must be on key's device cpu; got meta",
    ),
    # the options of a config, each once: tests/test_config.py has them all
    ({"gamma": 0}, ValueError, "gamma must be in (0, 1]; got 0"),
    ({"gamma": "high"}, TypeError, "gamma must be a number; got str"),
    ({"tau": 1.1}, ValueError, "tau must be in [0, 1]; got 1.1"),
    ({"block_size": 100}, ValueError, "block_size must be a multiple of 16 from 16 to 256; got 100"),
    ({"min_budget": -1}, ValueError, "min_budget must be >= 0 tokens; got -1"),
    (
        {"min_budget": 64, "max_budget": 32},
        ValueError,
        "max_budget must be at least 1 token and at least min_budget (64); got 32",
    ),
    *(
        ({name: "best"}, ValueError, f"{name} must be one of {words}; got 'best'")
        for name, words in (
            ("selection", "'coverage', 'reference'"),
            ("query_aware", "'flatten', 'per_query'"),
            ("pattern_queries", "'last', 'middle'"),
            ("index_queries", "'last', 'middle'"),
        )
    ),
    (
        {"config": FlexPrefillConfig()},
        ValueError,
        "config excludes the keywords that it holds; got config and block_size",
    ),
    ({"config": {"gamma": 0.9}}, TypeError, "config must be a FlexPrefillConfig; got dict"),
    # what the published code cannot do
    ({"selection": "reference"}, ValueError, WHOLE_PROMPT.format(64, 96)),
    (
        {"selection": "reference", "query": zeros(2, 4, 95, 32), "key": zeros(2, 2, 95, 32), "value": zeros(2, 2, 95, 48)},
        ValueError,
        WHOLE_PROMPT.format(95, 95),
    ),
    ({"selection": "reference", "softcap": 30.0}, ValueError, SHARES.format("softcap")),
    ({"selection": "reference", "window": 64}, ValueError, SHARES.format("window")),
    (
        {"selection": "reference", "attention_mask": torch.ones(2, 96, dtype=torch.bool)},
        ValueError,
        SHARES.format("attention_mask"),
    ),
    ({"selection": "reference", "q_offset": 32}, ValueError, SHARES.format("q_offset")),
    (
        {"selection": "reference", "share_kv_heads": "mean"},
        ValueError,
        'selection="reference" keeps what the published code keeps of each head, which takes no share_kv_heads="mean"; '
        'use "union" or selection="coverage"',
    ),
    *(
        (
            {"selection": "reference", **options},
            ValueError,
            'selection="reference" needs pattern_queries="last", index_queries="last" and query_aware="flatten"; '
            f"got {options.get('pattern_queries', 'last')!r}, {options.get('index_queries', 'last')!r} and "
            f"{options.get('query_aware', 'flatten')!r}",
        )
        for options in ({"pattern_queries": "middle"}, {"index_queries": "middle"}, {"query_aware": "per_query"})
    ),
]

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
        ({"value": zeros(2, 2, 96, size)}, ValueError, f"value must have a v_head_dim from 16 to 256; got {size}")
        for size in (8, 257)
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
    ({"backend": "triton", "dense_below": 0}, ValueError, 'backend="triton" needs a GPU; on a CPU use backend="auto"'),
]


def ids(refusals: Refusals) -> list[str]:
    def shown(x: Any) -> str:
        return f"{x.dtype} {tuple(x.shape)} {x.device}" if isinstance(x, Tensor) else str(x)

    return [", ".join(f"{name}={shown(x)}" for name, x in changes.items()) for changes, *_ in refusals]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=ids(REFUSED))
@pytest.mark.parametrize("function", [flexprefill_mask, flexprefill_attention])
def test_both_functions_refuse(function, changes, error, message):
    arguments = {**right(), **changes}
    if function is flexprefill_mask:
        del arguments["value"]
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        function(**arguments)


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED_BY_ATTENTION, ids=ids(REFUSED_BY_ATTENTION))
def test_attention_refuses(changes, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        flexprefill_attention(**{**right(), **changes})


@pytest.mark.parametrize(
    "reason",
    [
        "a CUDA device (got cpu)",
        "float16 or bfloat16 (got float32)",
        "block_size 128 (got 32)",
        "equal head_dim <= 128 (got 32 and 48 for value)",
        "not tested with softcap",
    ],
)
def test_flash_names_every_reason_why_it_cannot_run(reason):
    with pytest.raises(ValueError, match='^backend="flash" cannot run here: .*' + re.escape(reason)):
        flexprefill_attention(**right(), backend="flash", dense_below=0, softcap=30.0)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_gradients_on_a_cpu_are_refused(name):
    arguments = right()
    arguments[name].requires_grad_()
    with pytest.raises(ValueError, match=r"must not require gradients on a CPU; call under torch\.no_grad\(\)"):
        flexprefill_attention(**arguments, dense_below=0)


def test_log_sum_exp_on_a_cpu_is_refused():
    with pytest.raises(NotImplementedError, match="return_lse is not there on CPUs"):
        flexprefill_attention(**right(), dense_below=0, return_lse=True)


def test_a_cpu_is_refused_where_torch_has_no_kernel_for_it(monkeypatch):
    monkeypatch.setattr(attention, "HAS_CPU_KERNEL", False)
    with pytest.raises(NotImplementedError, match=r"FlexAttention runs on CPUs from torch 2\.6 on; got torch .* dense_below"):
        flexprefill_attention(**right(), dense_below=0)
    assert flexprefill_attention(**right()).shape == (2, 4, 64, 48)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_offset": 0},
        {"q_offset": 32},
        {"q_offset": torch.tensor(5)},
        {"q_offset": torch.tensor([5, 6], dtype=torch.int32)},
        {"window": 1},
        {"window": 10**12},
        {"scale": 1},
        {"softcap": 1e-3},
        *({"attention_mask": torch.ones(2, 96, dtype=dtype)} for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64)),
        {"query": zeros(2, 4, 96, 32)},
        {"query": zeros(2, 4, 1, 16), "key": zeros(2, 1, 1, 16)},
        {"query": zeros(2, 4, 64, 256), "key": zeros(2, 4, 96, 256)},
    ],
    ids=lambda changes: ids([(changes, ValueError, "")])[0],
)
def test_ends_of_the_ranges_are_accepted(changes):
    arguments = {**right(), **changes}
    del arguments["value"]
    batch, num_heads, q_len, _ = arguments["query"].shape
    shape = (batch, num_heads, *known_lengths(q_len, arguments["key"].shape[2], 32))
    assert flexprefill_mask(**arguments, min_budget=0).shape == shape


# No value of a tensor is read

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "statistics": {"return_stats": True},
    "everything kept": {"gamma": 1.0},
    "no query-aware head": {"tau": 0.0},
    "other rules": {"query_aware": "per_query", "pattern_queries": "middle", "max_budget": 64, "softcap": 20.0, "scale": 0.5},
    "padded window": {"attention_mask": torch.ones(2, 200, dtype=torch.int64), "window": 70},
    "offset": {"q_offset": 3},
    "offset tensor": {"q_offset": torch.tensor([3, 50]), "attention_mask": torch.ones(2, 200, dtype=torch.bool)},
    "published": {"selection": "reference", "q_len": 192, "kv_len": 192},
    "shared by union": {"share_kv_heads": "union"},
    "shared by mean": {"share_kv_heads": "mean", "return_stats": True},
}


def inputs(q_len: int = 150, kv_len: int = 200, **options: Any) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    return structured_inputs(generator, 2, 4, 2, q_len, kv_len, head_dim=32), {
        "gamma": 0.7,
        "block_size": 32,
        "min_budget": 0,
        **options,
    }


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_mask_can_be_made_of_tensors_without_values(options):
    tensors, options = inputs(**options)
    mode = FakeTensorMode()
    query, key = map(mode.from_tensor, tensors)
    options = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in options.items()}
    with mode:
        result = flexprefill_mask(query, key, **options)
    mask = result[0] if isinstance(result, tuple) else result
    assert mask.shape == (2, 4, *known_lengths(query.shape[2], key.shape[2], 32))
    with pytest.raises(DataDependentOutputException), mode:
        mask.to_dense().any().item()


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 20.0}, {"return_lse": True}, {"return_stats": True, "attention_mask": torch.ones(2, 200, dtype=torch.bool)}],
    ids=["plain", "softcap", "log-sum-exp", "padding"],
)
def test_dense_attention_can_be_traced_without_values(options):
    tensors, options = inputs(**options)
    mode = FakeTensorMode()
    query, key = map(mode.from_tensor, tensors)
    options = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in options.items()}
    with mode:
        result = flexprefill_attention(query, key, key, **options)
    out = result[0] if isinstance(result, tuple) else result
    assert out.shape == query.shape


READERS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "nonzero", "unique")


@pytest.fixture
def no_reading(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor's value was read")

    def start() -> None:
        for name in READERS:
            monkeypatch.setattr(Tensor, name, refuse)

    yield start
    monkeypatch.undo()


def test_reading_a_value_is_noticed(no_reading):
    no_reading()
    for read in (bool, int, float, Tensor.item, Tensor.tolist):
        with pytest.raises(AssertionError, match="value was read"):
            read(torch.ones(()))


@pytest.mark.attention
def test_attention_reads_no_value(no_reading):
    (query, key), options = inputs(
        attention_mask=torch.ones(2, 200, dtype=torch.bool), q_offset=torch.tensor([3, 50]), dense_below=0, return_stats=True
    )
    torch._dynamo.reset()
    with torch.no_grad():
        expected, _ = flexprefill_attention(query, key, key, **options)  # compiles, which may read what it likes
        no_reading()
        out, _ = flexprefill_attention(query, key, key, **options)
    assert torch.equal(out, expected)


def test_checks_read_no_value(no_reading):
    no_reading()
    arguments = right()
    with pytest.raises(ValueError, match="gamma"):
        flexprefill_mask(arguments["query"], arguments["key"], 2.0)
    flexprefill_mask(
        arguments["query"],
        arguments["key"],
        q_offset=torch.tensor([10**6, -7]),
        attention_mask=torch.zeros(2, 96, dtype=torch.bool),
        block_size=32,
        return_stats=True,
    )
