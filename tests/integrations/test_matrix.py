"""Every family with caches, paddings and prefills, against dense attention and under its masks."""

import pytest
import torch

from flexmask.integrations.huggingface import sparse_prefill
from tests.integrations.cells import FEWER_CELLS
from tests.integrations.common import KEEP_ALL, make_model
from tests.integrations.support import result_of

pytestmark = pytest.mark.attention


@pytest.mark.parametrize("cell", FEWER_CELLS, ids=str)
def test_equals_dense_attention(cell):
    result_of(cell)


def test_forward_refuses_a_chunk_size():
    model = make_model()
    with sparse_prefill(model, **KEEP_ALL), pytest.raises(NotImplementedError, match="prefill_chunk_size"):
        model(torch.ones(1, 40, dtype=torch.int64), prefill_chunk_size=20)
