"""Checks, search and attention read no value of a tensor."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from flexmask import flexprefill_mask
from tests.attention_calls import flexprefill_attention
from tests.cases import mask_function, structured_inputs
from tests.comparisons import known_lengths
from tests.refusals import right

OPTIONS: dict[str, dict[str, Any]] = {
    "statistics": {"return_stats": True},
    "everything kept": {"gamma": 1.0},
    "no query-aware head": {"tau": 0.0},
    "other rules": {"query_aware": "per_query", "pattern_queries": "middle", "max_budget": 64, "softcap": 20.0, "scale": 0.5},
    "padded window": {"attention_mask": torch.ones(2, 200, dtype=torch.int64), "window": 70},
    "offset": {"q_offset": 3},
    "offset tensor": {"q_offset": torch.tensor([3, 50]), "attention_mask": torch.ones(2, 200, dtype=torch.bool)},
    "gammas by head": {"gamma": [0.3, 0.5, 0.7, 1.0]},
    "a tensor of gammas": {"gamma": torch.tensor([0.3, 0.5, 0.7, 1.0])},
    "hybrid": {"method": "hybrid", "return_stats": True, "attention_mask": torch.ones(2, 200, dtype=torch.int64), "window": 70},
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
    mode, make = FakeTensorMode(), mask_function(options.pop("method", "flexprefill"))
    query, key = map(mode.from_tensor, tensors)
    options = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in options.items()}
    with mode:
        result = make(query, key, **options)
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
    options["gamma"] = torch.tensor([0.3, 0.5, 0.7, 1.0])
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
        gamma=torch.tensor([0.5, 7.0, -1.0, float("nan")]),
        q_offset=torch.tensor([10**6, -7]),
        attention_mask=torch.zeros(2, 96, dtype=torch.bool),
        block_size=32,
        return_stats=True,
    )
