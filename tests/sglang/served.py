"""One layer of SGLang over its own ForwardBatch, pools and torch_native backend, and steps of requests."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from flexmask.integrations.serving.options import ServingOptions
from flexmask.integrations.sglang.backend import sparse_backend
from flexmask.integrations.sglang.engine import SGLangEngine
from flexmask.settings import PrefillSettings

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 32, 4096
KEEP_ALL = PrefillSettings(gamma=1.0, block_size=32, dense_below=0)
OPTIONS: dict[str, Any] = {"gamma": 0.5, "min_budget": 32, "block_size": 32, "dense_below": 0}
SPARSE = PrefillSettings(**OPTIONS)


class Served:
    """One layer's cache, a backend over it, and requests in steps."""

    def __init__(self, settings=None, cache=torch.float32, kernel="torch_native", number=0, **layer):
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict({"attn": RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, number, **layer)})
        self.pool = self.make_pool(cache)
        self.requests = ReqToTokenPool(8, 2048, "cpu", False)
        self.runner = SimpleNamespace(
            device="cpu", dtype=torch.float32, model=self.model, token_to_kv_pool=self.pool, req_to_token_pool=self.requests
        )
        # translates slots for kernels; those on CPUs do not read them
        self.runner.kv_index_translator = Mock()
        self.backend = TorchNativeAttnBackend(self.runner)
        if settings is not None:
            self.engine = SGLangEngine(self.runner, ServingOptions(settings, kernel))
            self.backend = sparse_backend(self.backend, self.runner, self.engine)
        # slots of requests are mixed in the cache
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
        self.requests.req_to_token[:8, :512] = order.view(8, 512).int()

    def make_pool(self, cache):
        return MHATokenToKVPool(SLOTS, 1, cache, KV_HEADS, DIM, 1, "cpu", False)

    def cache(self, layer):
        return self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)

    def batch(self, chunks, mode=ForwardMode.EXTEND, **others):
        """SGLang's batch of one step; `chunks` are (request, tokens before, rows)."""
        places, before, rows = (list(each) for each in zip(*chunks, strict=True))
        slots = torch.cat([self.requests.req_to_token[p, b : b + r] for p, b, r in chunks]).long()
        lengths = torch.tensor(before) + torch.tensor(rows)
        made = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=slots + 1,
            positions=torch.cat([torch.arange(b, b + r) for _, b, r in chunks]),
            req_pool_indices=torch.tensor(places),
            seq_lens=lengths,
            out_cache_loc=slots,
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths,
            extend_num_tokens=sum(rows),
            extend_seq_lens=torch.tensor(rows),
            extend_prefix_lens=torch.tensor(before),
            extend_start_loc=torch.tensor(rows).cumsum(0) - torch.tensor(rows),
            extend_seq_lens_cpu=rows,
            extend_prefix_lens_cpu=before,
            extend_logprob_start_lens_cpu=[0] * len(rows),
            rids=[str(place) for place in places],
        )
        vars(made).update(others)
        return made

    def step(self, chunks, mode=ForwardMode.EXTEND, padding=0, writer="layer", options=None, **others):
        """Attention of one step; `options` are those of the layer's call.

        Another `writer` than the layer fills the cache: "another kernel", or "nobody".
        """
        batch = self.batch(chunks, mode, **others)
        query, key, value = (
            torch.cat([self.data(kind, p)[b : b + r] for p, b, r in chunks] + [torch.zeros(padding, heads * DIM)])
            for kind, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS))
        )
        self.backend.init_forward_metadata(batch)
        key, value = (x.view(-1, KV_HEADS, DIM) for x in (key, value))
        if writer == "another kernel":
            self.pool.set_kv_buffer(self.model.attn, batch.out_cache_loc, key, value)
        return self.backend.forward(query, key, value, self.model.attn, batch, writer == "layer", **(options or {}))

    @staticmethod
    def data(kind, request):
        heads = HEADS if kind == "query" else KV_HEADS
        seed = torch.Generator().manual_seed(request + 100 * ["query", "key", "value"].index(kind))
        return torch.randn(512, heads * DIM, generator=seed) * (2 if kind == "query" else 1)


class ServedMixture(Served):
    """The attention layer of a model whose other layers keep a state, by SGLang's own wrapper; `linear` is theirs."""

    def __init__(self, settings=None, **others):
        super().__init__(settings, number=3, **others)
        self.linear = Mock(needs_cpu_seq_lens=False)
        self.backend = HybridLinearAttnBackend(self.backend, self.linear, [3])

    def make_pool(self, cache):
        return HybridLinearKVPool(SLOTS, cache, 1, KV_HEADS, DIM, [1, 3], "cpu", mamba_pool=None)


# long and short prompts, later chunks among them, and decoding rows at the end
STEPS = (
    [(0, 0, 200)],
    [(1, 0, 20), (2, 0, 130), (0, 200, 77)],
    [(0, 277, 100), (3, 0, 15), (2, 130, 64), (1, 20, 1)],
    [(0, 377, 1), (1, 21, 1), (2, 194, 90), (4, 0, 60)],
)


def outputs(served, **options):
    modes = [ForwardMode.EXTEND, *[ForwardMode.MIXED] * (len(STEPS) - 1)]
    return [served.step(chunks, mode, **options) for chunks, mode in zip(STEPS, modes, strict=True)]
