"""No method writes out a tensor of the order of tokens squared: sizes at 128k tokens, of tensors that hold no values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flexmask import gallery_method as core
from flexmask.block_masks import MASKS

TOKENS, HEADS, HEAD_DIM = 131072, 32, 64


class Largest(TorchDispatchMode):
    """Remembers the largest storage that any operator returned."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("name", [name for name in MASKS if name != "flexprefill"])
def test_nothing_grows_with_the_square_of_the_tokens(name):
    with FakeTensorMode(), Largest() as largest:
        # the last rows of the prompt are enough for the methods that go slice by slice: a slice is as large as ever
        rows = 512 if name == "oracle" else 4096 if MASKS[name].method.by_rows else TOKENS
        query, key = torch.empty(1, HEADS, rows, HEAD_DIM), torch.empty(1, 8, TOKENS, HEAD_DIM)
        MASKS[name](query, key)
    maps = HEADS * (rows // 128) * (TOKENS // 128) * 8  # of blocks, in int64
    assert largest.nbytes <= max(core.MOST_NUMBERS * 4, maps, query.nbytes, key.nbytes)
    assert largest.nbytes < TOKENS**2 / 8
