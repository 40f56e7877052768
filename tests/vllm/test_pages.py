"""Keys and values gathered from pages, in any order in memory."""

import pytest
import torch

from flexmask.integrations.vllm.pages import FP8_CACHES, PageTable, gathered, in_fp8
from tests.vllm.cpu_plugin.flexmask_vllm_cpu import gathered_on_cpu, order_of_cache

PAGES, HEADS, PAGE, DIM = 9, 3, 16, 32
TABLE = torch.tensor([7, 2, 5, 0, 0], dtype=torch.int32)
# on the last page two tokens, on a full page, fewer than a page
LENGTHS = (34, 48, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=["numbers", "bytes"])
@pytest.mark.parametrize("order", ["heads first", "tokens first", "pages apart"])
@pytest.mark.parametrize(
    ("page_size", "tokens"), [*((PAGE, tokens) for tokens in LENGTHS), (1, 48), (48, 1111), (528, 1111), (544, 1111)]
)
def test_pages_of_a_gpu_cache(page_size, tokens, order, dtype):
    """Of a mixture they take as many bytes as a state; neither blocks nor chunks need divide them."""
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
    assert torch.equal(in_fp8(numbers.view(torch.uint8), name).float(), numbers.float())
    # vLLM's CPU cache has the dtype
    assert in_fp8(numbers, name) is numbers


def transposed(keys, values, cache):
    """Keys by dimension, values by token: vLLM's order for AVX."""
    page_size, heads, head_dim = keys.shape
    halves = cache.view(1, heads, 2, page_size * head_dim)
    halves[0, :, 0] = keys.permute(1, 2, 0).flatten(1)
    halves[0, :, 1] = values.transpose(0, 1).flatten(1)


def paired(keys, values, cache):
    """Pairs of neighbours, for tiles of AMX."""
    page_size, heads, head_dim = keys.shape
    halves = cache.view(1, heads, 2, page_size * head_dim)
    halves[0, :, 0] = keys.permute(1, 2, 0).reshape(heads, head_dim // 2, 2, page_size).transpose(-1, -2).flatten(1)
    halves[0, :, 1] = values.permute(1, 0, 2).reshape(heads, page_size // 2, 2, head_dim).transpose(-1, -2).flatten(1)


@pytest.mark.parametrize("write", [transposed, paired])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_pages_of_a_cpu_cache_in_an_order_found_by_writing(write, dtype):
    orders = order_of_cache(PAGE, DIM, dtype, write)
    keys, values = torch.randn(2, HEADS, 48, DIM).to(dtype)
    cache = torch.full((PAGES, HEADS, PAGE, 2 * DIM), float("nan")).to(dtype)
    for number, page in enumerate(TABLE[:3]):
        part = slice(number * PAGE, (number + 1) * PAGE)
        write(keys[:, part].transpose(0, 1), values[:, part].transpose(0, 1), cache[page : page + 1])
    for tokens in LENGTHS:
        for first in (0, 3, tokens):
            found = gathered_on_cpu(cache, PageTable(TABLE, tokens).since(first), DIM, orders)
            for made, right in zip(found, (keys, values), strict=True):
                assert torch.equal(made.float(), right[:, first:tokens].float())


def test_a_cache_that_loses_elements_is_refused():
    def forgetful(keys, values, cache):
        transposed(keys, values, cache)
        cache[0, 0, 0, 3] = 0

    with pytest.raises(RuntimeError, match="in an order that flexmask cannot read"):
        order_of_cache(PAGE, DIM, torch.float32, forgetful)


def test_the_order_of_a_page_with_many_elements():
    """A mixture's page of wide heads: more elements than six octal digits count."""
    page_size, dim = 544, 512
    keys, values = order_of_cache(page_size, dim, torch.float32, transposed)
    element = torch.arange(page_size * dim).view(page_size, dim)
    assert torch.equal(keys.view(page_size, dim), element.view(dim, page_size).T)
    assert torch.equal(values.view(page_size, dim), element)
