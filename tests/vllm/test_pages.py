"""Keys and values gathered from pages, in any order in memory."""

import pytest
import torch

from flexmask.integrations.vllm.pages import FP8_CACHES, PageTable, gathered, viewed_in_cache_dtype

PAGES, HEADS, PAGE, DIM = 9, 3, 16, 32
TABLE = torch.tensor([7, 2, 5, 0, 0], dtype=torch.int32)
# two tokens on the last page, full pages only, fewer tokens than a page
LENGTHS = (34, 48, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=["numbers", "bytes"])
@pytest.mark.parametrize("order", ["heads first", "tokens first", "pages apart"])
@pytest.mark.parametrize(
    ("page_size", "tokens"), [*((PAGE, tokens) for tokens in LENGTHS), (1, 48), (48, 1111), (528, 1111), (544, 1111)]
)
def test_pages_of_a_gpu_cache(page_size, tokens, order, dtype):
    """A mixture's pages take as many bytes as a state; blocks and chunks need not divide them."""
    generator = torch.Generator().manual_seed(0)
    number = -(-tokens // page_size) + 2
    cache = torch.randint(256, (number, HEADS, page_size, 2 * DIM), generator=generator).to(dtype)
    if order == "tokens first":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "pages apart":  # another layer's page between two
        cache = torch.stack([cache, 1 + cache], 1).transpose(2, 3).contiguous()[:, 0].transpose(1, 2)
    pages = torch.randperm(number, generator=generator)
    rows = torch.stack([cache[pages[token // page_size], :, token % page_size] for token in range(tokens)], 1)
    table = PageTable(pages.int(), tokens)
    for first in (0, 3, 527, 528, 1000, tokens):
        made = gathered(cache, table.since(min(first, tokens)), DIM)
        assert all(map(torch.equal, made, rows[:, first:].split(DIM, -1)))


@pytest.mark.parametrize("shape", [(PAGES, PAGE, HEADS, DIM), (2, PAGES, PAGE, HEADS, 2 * DIM)])
def test_a_cache_of_another_shape_is_refused(shape):
    with pytest.raises(RuntimeError, match=r"vLLM's cache must be \(pages, num_kv_heads, tokens in a page, 64\); got shape"):
        gathered(torch.zeros(shape), PageTable(TABLE, 34), DIM)


@pytest.mark.parametrize("name", FP8_CACHES)
def test_numbers_of_an_fp8_cache_may_be_bytes(name):
    numbers = torch.randn(64).to(FP8_CACHES[name])
    assert torch.equal(viewed_in_cache_dtype(numbers.view(torch.uint8), name).float(), numbers.float())
    # vLLM's CPU cache has the dtype
    assert viewed_in_cache_dtype(numbers, name) is numbers
