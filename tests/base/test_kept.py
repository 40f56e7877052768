"""Constant tensors of earlier calls."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexmask import hybrid_mask
from flexmask.base import kept
from flexmask.base.kept import made_once
from flexmask.flex import mask_mods
from flexmask.numbers import Filled


def full(device, number):
    return torch.full((3,), number, device=device)


def test_values_of_other_types_are_made_anew():
    cpu, make = torch.device("cpu"), lambda *_: object()
    found = [kept._kept(make, cpu, 0, False, value) for value in (Filled(0.9, 1), (0.9, 1.0), (0.9, 1), 1, 1.0, True)]
    assert len(set(found)) == 5  # tuples are compared by value
    assert kept._kept(make, cpu, 0, False, Filled(0.9, 1)) is found[0]


@pytest.fixture
def pretended(monkeypatch):
    """A device whose tensors are kept, which `full` makes on the CPU."""
    monkeypatch.setattr(kept, "stream_of", lambda device: 0)
    monkeypatch.setattr(kept, "_is_capturing", lambda: False)
    kept._kept.cache_clear()
    yield torch.device("cuda")
    kept._kept.cache_clear()


def on_cpu(device, number):
    return torch.full((3,), number)


def test_what_was_made_is_kept(pretended, monkeypatch):
    first = made_once(on_cpu, pretended, 2)
    assert made_once(on_cpu, pretended, 2) is first
    assert made_once(on_cpu, torch.device("cpu"), 2) is not first
    with torch.inference_mode():
        assert made_once(on_cpu, pretended, 2) is not first
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_is_capturing", lambda: True)
        assert made_once(on_cpu, pretended, 2) is not first
    monkeypatch.setattr(kept, "stream_of", lambda device: 1)
    assert made_once(on_cpu, pretended, 2) is not first


def test_surroundings_that_wrap_tensors_make_their_own(pretended):
    traced = torch.compile(lambda x: x + made_once(on_cpu, pretended, 2), fullgraph=True, backend="eager")
    assert torch.equal(traced(torch.ones(3)), torch.full((3,), 3.0))
    assert torch.func.grad(lambda x: (x * made_once(on_cpu, pretended, 2)).sum())(torch.ones(3)).tolist() == [2, 2, 2]
    with FakeTensorMode():
        made_once(on_cpu, pretended, 2)
    assert kept._kept.cache_info().currsize == 0


def test_masks_capture_objects_of_their_own(pretended, monkeypatch):
    monkeypatch.setattr(mask_mods, "_filled", lambda device, batch, number: torch.full((batch,), number))
    monkeypatch.setattr(mask_mods, "captured", lambda tensor: tensor)
    one, other = (mask_mods.captured_number(128, 1, pretended) for _ in range(2))
    assert one is not other and one.data_ptr() == other.data_ptr()


@pytest.mark.gpu
def test_one_tensor_serves_a_stream_and_mode(cuda):
    device = torch.empty(0, device=cuda).device
    first = made_once(full, device, 2)
    assert made_once(full, device, 2) is first
    assert made_once(full, device, 3) is not first
    with torch.inference_mode():
        assert made_once(full, device, 2) is not first
    with torch.cuda.stream(torch.cuda.Stream()):
        assert made_once(full, device, 2) is not first
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert made_once(full, device, 2) is not first


@pytest.mark.gpu
def test_one_head_and_a_tuple_of_two_are_told_apart(cuda):
    query = torch.randn(1, 2, 500, 32, device=cuda)
    hybrid_mask(query[:, :1], query[:, :1], gamma=0.9, block_size=32)  # one head at 0.9 is written (0.9, 1)
    found = hybrid_mask(query, query, gamma=(0.9, 1.0), block_size=32)
    alone = hybrid_mask(query[:, 1:], query[:, 1:], gamma=1.0, block_size=32)
    assert torch.equal(found.kv_num_blocks[:, 1:], alone.kv_num_blocks)
    assert torch.equal(found.full_kv_num_blocks[:, 1:], alone.full_kv_num_blocks)
