"""NumPy's numbers and arrays stand for Python's, and everything else is still refused by name."""

import json

import numpy as np
import pytest
import torch

from flexmask import hybrid_mask, sparse_attention, sparse_attention_varlen
from flexmask.base.checks import plain_number, plain_numbers
from flexmask.settings import PrefillSettings

OPTIONS = {"gamma": 0.5, "block_size": 32, "min_budget": 32, "row_stride": 4, "window": 100, "q_offset": 64, "scale": 0.5}
NUMPY = {
    "gamma": np.float32(0.5), "block_size": np.int64(32), "min_budget": np.int32(32), "row_stride": np.uint8(4),
    "window": np.int64(100), "q_offset": np.int64(64), "scale": np.float16(0.5),
}  # fmt: skip


def query_and_key():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 4, 128, 32, generator=generator), torch.randn(1, 2, 192, 32, generator=generator)


@pytest.mark.parametrize("name", OPTIONS)
def test_numpy_scalars_give_the_same_mask(name):
    query, key = query_and_key()
    expected = hybrid_mask(query, key, **OPTIONS)
    assert torch.equal(hybrid_mask(query, key, **OPTIONS | {name: NUMPY[name]}).to_dense(), expected.to_dense())


@pytest.mark.parametrize("gamma", [np.array([0.5, 0.6, 0.7, 0.9]), [np.float32(0.5), 0.6, 0.7, np.float64(0.9)], range(1, 2)])
def test_arrays_and_sequences_are_numbers_by_head(gamma):
    query, key = query_and_key()
    heads = len(gamma)
    plain = [float(each) for each in gamma]
    found, expected = (hybrid_mask(query[:, :heads], key[:, :1], block_size=32, gamma=each) for each in (gamma, plain))
    assert torch.equal(found.to_dense(), expected.to_dense())


def test_every_entry_takes_them():
    query, key = query_and_key()
    sparse_attention(query, key, key, **NUMPY, dense_below=np.int64(1000), max_mask_bytes=np.int64(2**20))
    rows = query[0].transpose(0, 1)
    bounds = np.array([0, 50, 128])
    keys = key[0, :, :128].transpose(0, 1)
    given = (rows, keys, keys)
    expected = sparse_attention_varlen(*given, [0, 50, 128], [0, 50, 128], dense_below=1000)
    found = sparse_attention_varlen(*given, bounds, bounds, max_seqlen_q=np.int64(78), dense_below=np.int32(1000))
    assert torch.equal(found, expected)


def test_settings_with_numpy_numbers_are_those_with_pythons_and_can_be_saved():
    given = {"gamma": np.array([0.5, 1.0]), "block_size": np.int64(32), "dense_below": np.int32(0)}
    found = PrefillSettings(layers={np.int64(3): {"gamma": np.float32(0.75)}}, dense_layers=np.array([1, 2]), **given)
    written = PrefillSettings(
        layers={3: {"gamma": 0.75}}, dense_layers=(1, 2), gamma=[0.5, 1.0], block_size=32, dense_below=0
    ).to_dict()
    assert json.dumps(found.to_dict()) == json.dumps(written)


def test_what_is_no_number_stays_for_the_checks():
    tensor, flag = torch.ones(2), np.bool_(True)
    assert plain_numbers(tensor) is tensor and plain_number(flag) is flag
    assert plain_numbers(np.array([[1, 2], [3, 4]])) == ((1, 2), (3, 4))
    query, key = query_and_key()
    for gamma, said in ((np.array([0.5, 0.5]), "4 heads; got 2 numbers"), (np.array(["a"] * 4), r"gamma\[0\] must be a number")):
        with pytest.raises((TypeError, ValueError), match=said):
            hybrid_mask(query, key, gamma=gamma)
    with pytest.raises(TypeError, match="window must be an int; got float"):
        hybrid_mask(query, key, window=np.float32(64))
