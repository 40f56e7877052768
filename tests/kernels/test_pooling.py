"""Block means by the kernel against the plain step."""

import pytest
import torch

from flexmask.base.blocks import cut_into_blocks
from flexmask.plain.pooling import block_means
from tests.kernels.support import DEVICE, LAYOUTS, call_of, in_layout, normal, tokens_of

pytest.importorskip("triton")

from flexmask import kernels
from flexmask.kernels.pooling import key_means, query_means


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "block_size", "head_dim"), [(100, 100, 16, 24), (40, 97, 48, 64), (256, 256, 128, 32), (1, 1, 64, 16)]
)
def test_means_of_valid_tokens(q_len, kv_len, block_size, head_dim, padded):
    query, key = (normal(2, heads, head_dim, length).mT for heads, length in ((3, q_len), (1, kv_len)))
    call = call_of(query, key, padded=padded)
    tokens = tokens_of(call)
    # what padding holds does not matter
    query, key = (
        torch.where(valid[:, None, :, None], x, float("nan")) for x, valid in ((query, tokens.row_valid), (key, tokens.key_valid))
    )
    problem = cut_into_blocks(call.with_fields(query=query, key=key), block_size, kernels)
    torch.testing.assert_close(key_means(problem), block_means(key, tokens.key_valid, block_size))
    wanted = torch.tensor([[True, False, True], [True, True, True]], device=DEVICE)
    got = query_means(problem, wanted)
    torch.testing.assert_close(got[wanted], block_means(query, tokens.row_valid, block_size)[wanted])


def test_keys_behind_the_last_row_do_not_count():
    query, key = normal(2, 2, 20, 16), normal(2, 1, 100, 16, seed=1)
    call = call_of(query, key).with_fields(offset=torch.tensor([3, 50], dtype=torch.int32, device=DEVICE))
    filled = tokens_of(call).key_valid
    expected = block_means(torch.where(filled[:, None, :, None], key, float("nan")), filled, 16)
    torch.testing.assert_close(key_means(cut_into_blocks(call, 16, kernels)), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_of_any_layout(layout):
    key = in_layout(layout, 2, 3, 50, 24)
    problem = cut_into_blocks(call_of(normal(2, 3, 50, 24), key), 16, kernels)
    torch.testing.assert_close(key_means(problem), block_means(key, None, 16))
