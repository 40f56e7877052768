"""Checks, search and attention read no value of a tensor."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from flexmask import flexprefill_mask
from tests.attention_calls import flexprefill_attention
from tests.cases import structured_inputs
from tests.refusals import right


def inputs(q_len: int = 150, kv_len: int = 200, **options: Any) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    return structured_inputs(generator, 2, 4, 2, q_len, kv_len, head_dim=32), {
        "gamma": 0.7,
        "block_size": 32,
        "min_budget": 0,
        **options,
    }


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
