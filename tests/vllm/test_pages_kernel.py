"""The kernel that reads vLLM's cache against torch's way: in Triton's interpreter, and on a GPU."""

import itertools
import math
import random

import pytest
import torch

pytest.importorskip("triton")

from flexmask.integrations.serving.chunk import concat_cached
from flexmask.integrations.vllm import pages_kernel
from flexmask.integrations.vllm.pages import PageTable, gathered, kernel_serves

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, the kernel runs there")
HEADS = 2
ORDERS = ("heads first", "tokens first", "pages apart")
PAGE_SIZES = (1, 16, 48, 528)
CACHED = (1, 15, 16, 17, 63, 129, 1000)
ROWS = (1, 63, 129, 700)
DIMS = (32, 64, 80, 128)
AROUND = 64  # numbers before and behind an output


def cache_of(order, pages, page_size, head_dim, dtype, device):
    """A cache of NaN in one of the memory orders."""
    shape = {"heads first": (pages, HEADS, page_size), "tokens first": (pages, page_size, HEADS)}
    # another layer's page between two
    shape["pages apart"] = (pages, 2, page_size, HEADS)
    cache = torch.full((*shape[order], 2 * head_dim), math.nan, dtype=dtype, device=device)
    return cache if order == "heads first" else (cache if order == "tokens first" else cache[:, 0]).transpose(1, 2)


def call_of(order, page_size, cached_len, skipped, rows, head_dim, dtype, device):
    """Cache, page table and chunk; of the cache only the tokens from `skipped` to `cached_len` are no NaN."""
    used = -(-cached_len // page_size)
    cache = cache_of(order, used + 2, page_size, head_dim, dtype, device)
    # page 0 is the one that vLLM shows for freed pages
    row = 1 + torch.randperm(used + 1, device=device)[:used].int()
    row[: skipped // page_size] = 0
    token = torch.arange(skipped, cached_len, device=device)
    pages, offsets = row[token // page_size].long(), token % page_size
    cache[pages, :, offsets] = torch.randn(cached_len - skipped, HEADS, 2 * head_dim, device=device).to(dtype)
    # one packed tensor, as a projection gives it: 4 query heads, then keys, then values
    packed = torch.randn(rows, (4 + 2 * HEADS) * head_dim, device=device).to(dtype)
    _, key, value = packed.split([4 * head_dim, HEADS * head_dim, HEADS * head_dim], -1)
    return cache, PageTable(row, cached_len).since(skipped), (key.view(rows, HEADS, -1), value.view(rows, HEADS, -1))


def by_torch(cache, page_table, chunk):
    cached = gathered(cache, page_table, chunk[0].shape[2])
    return [concat_cached(*parts, skipped=page_table.first) for parts in zip(cached, chunk, strict=True)]


@pytest.fixture
def equal(monkeypatch):
    """Compare a call with torch's, bit for bit; new memory holds NaN, and nothing is written around an output."""
    new_empty = torch.Tensor.new_empty

    def compare(cache, page_table, chunk):
        buffers = []

        def poisoned(tensor, shape, **options):
            if options:  # the interpreter's own
                return new_empty(tensor, shape, **options)
            buffers.append(new_empty(tensor, math.prod(shape) + 2 * AROUND).fill_(math.nan))
            return buffers[-1][AROUND:-AROUND].view(shape)

        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "new_empty", poisoned)
            made = pages_kernel.keys_and_values(cache, page_table, chunk)
        assert len(buffers) == 2 and all(each.is_contiguous() for each in made)
        for found, right, buffer in zip(made, by_torch(cache, page_table, chunk), buffers, strict=True):
            assert not right.isnan().any()
            assert torch.equal(found, right)
            assert buffer[:AROUND].isnan().all() and buffer[-AROUND:].isnan().all()

    return compare


@interpreted
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("order", ORDERS)
def test_equals_torch(order, page_size, equal):
    draw = random.Random(f"{order} {page_size}").choice
    for cached_len, rows in itertools.product(CACHED, ROWS):
        skipped = draw((0, cached_len // 2, cached_len - 1, cached_len))
        head_dim, dtype = draw(DIMS), draw((torch.float32, torch.bfloat16))
        equal(*call_of(order, page_size, cached_len, skipped, rows, head_dim, dtype, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("order", ORDERS)
def test_equals_torch_on_a_gpu(order, page_size, equal, cuda):
    for cached_len, rows, head_dim in itertools.product((*CACHED, 20_000), ROWS, DIMS):
        for skipped in {0, cached_len // 2, cached_len}:
            call = call_of(order, page_size, cached_len, skipped, rows, head_dim, torch.bfloat16, cuda)
            assert kernel_serves(call[0], call[2])
            equal(*call)


@pytest.mark.gpu
def test_requests_compile_nothing(cuda, monkeypatch):
    """After one compilation for aligned addresses of page tables, and one for others."""
    run = pages_kernel.kernel(pages_kernel._keys_and_values_kernel.jit.fn)
    if not run.launched_directly:
        pytest.skip("launches go through this Triton")
    monkeypatch.setattr(pages_kernel, "_keys_and_values_kernel", run)
    pages_kernel.compile_for([128, 128], torch.bfloat16, cuda)
    assert len(run._compiled) == 2
    for order, page_size, cached_len, first in itertools.product(ORDERS, PAGE_SIZES, CACHED, (0, 1)):
        cache, page_table, chunk = call_of(order, page_size, cached_len, 0, 63, 128, torch.bfloat16, cuda)
        table = torch.cat([page_table.page_ids[:first], page_table.page_ids])[first:]
        pages_kernel.keys_and_values(cache, PageTable(table, cached_len), chunk)
    assert len(run._compiled) == 2


@interpreted
def test_a_cache_of_more_numbers_than_32_bits_count():
    # 2 GB of addresses, of which the last page takes memory
    cache = torch.empty(2**31 // 512 + 1, 1, 8, 64, dtype=torch.int8)
    cache[-1] = torch.arange(512).view(1, 8, 64)
    page_table = PageTable(torch.tensor([len(cache) - 1], dtype=torch.int32), 8)
    chunk = (torch.ones(1, 1, 32, dtype=torch.int8), torch.zeros(1, 1, 32, dtype=torch.int8))
    key, value = pages_kernel.keys_and_values(cache, page_table, chunk)
    assert torch.equal(torch.cat([key, value], -1), torch.cat([cache[-1], torch.cat(chunk, -1)], 1))


@interpreted
def test_what_is_compiled_before_requests_is_compiled_for_each_width(monkeypatch):
    calls = []
    monkeypatch.setattr(
        pages_kernel, "keys_and_values", lambda cache, table, chunk: calls.append((cache, table.page_ids, *chunk))
    )
    pages_kernel.compile_for([64, 80, 64], torch.bfloat16, torch.device("cpu"))
    assert [call[2].shape[2] for call in calls] == [64, 64, 80, 80]
    assert all(call[0].dtype == call[2].dtype == call[3].dtype == torch.bfloat16 for call in calls)
    # a table's address is a multiple of 16 bytes or not
    assert [call[1].data_ptr() % 16 == 0 for call in calls] == [True, False] * 2


class OnGPU(torch.Tensor):
    """A tensor of the host that says that it is on a GPU."""

    is_cuda = True


def test_serves_caches_of_the_chunk_s_dtype_on_a_gpu():
    def serves(cache, key, value):
        return kernel_serves(cache.as_subclass(OnGPU), (key.as_subclass(OnGPU), value.as_subclass(OnGPU)))

    cache, chunk = torch.zeros(3, HEADS, 16, 128), torch.zeros(2, 5, HEADS, 64)
    assert serves(cache, *chunk) and not kernel_serves(cache, (chunk[0], chunk[1]))
    assert serves(cache.transpose(1, 2).contiguous().transpose(1, 2), *chunk)
    strided = torch.zeros(5, HEADS, 128)[..., ::2]
    for wrong in (
        (cache.to(torch.float8_e4m3fn), *chunk),
        (cache.to(torch.uint8), *chunk),
        (cache.bfloat16(), *chunk),
        (cache.transpose(2, 3).contiguous().transpose(2, 3), *chunk),
        (cache, chunk[0], strided),
        (cache, strided, chunk[1]),
        # shapes that do not fit
        (cache, chunk[0], chunk[1, ..., :32]),
        (cache[:, :1], *chunk),
        (cache[..., :64], *chunk),
        (cache[None], *chunk),
    ):
        assert not serves(*wrong)
