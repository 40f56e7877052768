"""No method allocates a tensor of the order of tokens squared, at 128k fake tokens."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flexmask import METHODS, select
from flexmask.base.inputs import attention_inputs
from tests.block_masks.gallery import MASKS

TOKENS, HEADS, HEAD_DIM = 131072, 16, 64


class Largest(TorchDispatchMode):
    """The largest storage that any operator returned."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("name", MASKS)
def test_nothing_exceeds_the_bytes_that_the_method_states_and_grows_with_the_square_of_the_tokens(name):
    by_rows = METHODS[name].row_numbers is not None
    with FakeTensorMode(), Largest() as largest:
        # methods that go slice by slice need only the last rows
        rows = 512 if name == "oracle" else 4096 if by_rows else TOKENS
        query, key = torch.empty(1, HEADS, rows, HEAD_DIM), torch.empty(1, 4, TOKENS, HEAD_DIM)
        stated = HEADS * METHODS[name].checked(128, {}).for_inputs(attention_inputs(query, key)).head_bytes
        largest.nbytes = 0
        MASKS[name](query, key)
    a_slice = 4 * max(select.MOST_NUMBERS, HEADS * 128 * TOKENS) if by_rows else 0
    assert largest.nbytes <= max(stated, a_slice)
    assert largest.nbytes < TOKENS**2 / 8
