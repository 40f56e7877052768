"""Calls of every mask: no value is read, the call traces whole."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.block_masks.gallery import MASKS, SETTINGS, SPARSE, all_masks, made, serves
from tests.compile_support import lists_of

# with padding, a window and offsets by batch row, where a method serves these
FULLEST = {name: "offsets by batch row" if serves(name, "offsets by batch row") else "whole" for name in MASKS}


@pytest.mark.parametrize(("name", "setting"), [*FULLEST.items(), *((name, "ragged") for name in MASKS if serves(name, "ragged"))])
def test_no_value_is_read(name, setting):
    chosen = SETTINGS[setting]
    mode = FakeTensorMode()

    def fake(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) else x

    query, key = map(fake, chosen.inputs("cpu"))
    options = {option: fake(x) for option, x in chosen.shared_options("cpu").items()}
    # reading a fake tensor raises
    with mode:
        mask = MASKS[name](query, key, **SPARSE[name], **options)
        with pytest.raises(DataDependentOutputException):
            mask.kv_num_blocks.sum().item()
    assert mask.shape == made(name, setting).mask.shape


@all_masks
def test_traces_whole(name):
    chosen = SETTINGS[FULLEST[name]]
    options = {**SPARSE[name], **chosen.shared_options("cpu")}
    torch._dynamo.reset()  # the function below would run out of recompilations

    @torch.compile(fullgraph=True, backend="eager")
    def lists(query, key):
        return lists_of(MASKS[name](query, key, **options))

    for got, expected in zip(lists(*chosen.inputs("cpu")), lists_of(made(name, FULLEST[name]).mask), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", [name for name in MASKS if serves(name, "left padding")])
def test_a_batch_row_that_is_all_padding_has_density_0(name):
    query, key = SETTINGS["left padding"].inputs("cpu")
    tokens = torch.ones(query.shape[0], key.shape[2], dtype=torch.bool)
    tokens[-1] = False
    stats = MASKS[name](query, key, **SPARSE[name], block_size=32, attention_mask=tokens, return_stats=True)[1]
    assert (stats.density[-1] == 0).all() and (stats.density[:-1] > 0).all()
