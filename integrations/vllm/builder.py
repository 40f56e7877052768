"""The metadata builder, which also splits each step (`Engine.split`), for `impl`."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

from flexmask.integrations.serving.engine import StockBase
from flexmask.integrations.serving.layers import SparseLayer
from flexmask.integrations.serving.split import StepSplit, StockSpan
from flexmask.integrations.vllm.engine import engine_of, follow_requests
from flexmask.integrations.vllm.pages import PageTable


class Step(NamedTuple):
    """One step of vLLM's scheduler: its split, and what either part of it needs."""

    split: StepSplit
    stock: tuple[Any, ...]  # metadata per stock span
    page_tables: tuple[PageTable | None, ...]  # of each sparse request's cached tokens; None: it has none


class SparsePrefillBuilder(StockBase):  # type: ignore[misc]
    """Mixin before a stock builder; its metadata carries the split step as ``flexmask_step``.

    Metadata without it runs stock: for CUDA graph capture, for layers none of which is sparse, and from wrappers of this builder
    (chunked local attention, fast prefill), which show attention other requests.
    """

    # the parts of the metadata would keep the old block table
    supports_update_block_table = False
    flexmask_own: type | None = None  # this class, not one that vLLM derives from it

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **options: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **options)
        self.flexmask_engine = engine_of(vllm_config)
        self.flexmask_engine.prepare(device, in_profile=False)
        is_sparse = any(isinstance(self.flexmask_engine.roles.get(name), SparseLayer) for name in layer_names)
        self._splits_steps = is_sparse and type(self) is self.flexmask_own
        if is_sparse and not self._splits_steps:
            self.flexmask_engine.counters.warn_once(f"{type(self).__name__} shows layers other requests")
        self._policy = self.flexmask_engine.options.policy  # of latent attention another
        follow_requests(vllm_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """At most graphs of uniform decoding batches."""
        stock = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(stock, AttentionCGSupport.UNIFORM_BATCH, key=lambda support: support.value)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self._without_split(super().build_for_cudagraph_capture, common_attn_metadata)

    def build_for_drafting(self, *arguments: Any, **options: Any) -> Any:
        """Metadata without a split: the model verifies the draft's tokens."""
        return self._without_split(super().build_for_drafting, *arguments, **options)

    def _without_split(self, build: Any, *arguments: Any, **options: Any) -> Any:
        # the stock functions call build
        splits = self._splits_steps
        try:
            self._splits_steps = False
            return build(*arguments, **options)
        finally:
            self._splits_steps = splits

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self._splits_steps:
            return metadata
        split = self._split(common_attn_metadata, metadata)
        parts = []
        if split.sparse and split.stock:
            slices = [UBatchSlice(slice(span.first, span.last), slice(span.start, span.stop)) for span in split.stock]
            parts = [self._part(part) for part in split_attn_metadata(slices, common_attn_metadata)]
        pages = common_attn_metadata.block_table_tensor
        page_tables = tuple(PageTable(pages[x.batch_index], x.cached_len) if x.cached_len else None for x in split.sparse)
        metadata.flexmask_step = Step(split, tuple(parts), page_tables)
        return metadata

    def _part(self, common: Any) -> Any:
        # fast: the one buffer for an ahead-of-time schedule (FA3) belongs to the metadata of all rows
        return super().build(0, common, True)

    def _split(self, common: Any, metadata: Any) -> StepSplit:
        num_reqs = common.num_reqs
        if common.max_query_len < self._policy.least_rows:  # as when all decode: reads no request by itself
            rows = common.query_start_loc_cpu[: num_reqs + 1].diff()
            prefills = rows > 1 if common.is_prefilling is None else common.is_prefilling[:num_reqs]
            # requests that pad the batch for a CUDA graph have no rows, and may have no entry in is_prefilling
            of_prefills = rows[: len(prefills)][prefills]
            return StepSplit((), (StockSpan(0, num_reqs, 0, int(rows.sum())),), 0, int(of_prefills.sum()))
        starts = common.query_start_loc_cpu[: num_reqs + 1].tolist()
        of_requests = (common.seq_lens_cpu_upper_bound, common.is_prefilling)
        seq_lens, is_prefilling = (None if numbers is None else numbers[:num_reqs].tolist() for numbers in of_requests)
        return self.flexmask_engine.split(
            starts,
            seq_lens,
            step_reason(common),
            is_prefilling,
            self.flexmask_engine.options_in_step,
            self.flexmask_engine.prompt_lens,
            self._policy,
        )


def step_reason(common: Any) -> str | None:
    """Give the reason if all rows of a step run stock."""
    if common.causal is not True:
        return "attention of a step is not causal"
    if common.seq_lens_cpu_upper_bound is None:
        return "the host has no lengths of a step"
    # requests without images have an empty list
    return "a step has images that see later tokens" if any((common.mm_req_doc_ranges or {}).values()) else None


class SparseLatentBuilder(SparsePrefillBuilder):
    """The same for multi-head latent attention, whose decoding rows come first."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # more rows than the stock backend decodes
        self._policy = self._policy._replace(least_rows=max(self._policy.least_rows, self.reorder_batch_threshold + 1))

    def _split(self, common: Any, metadata: Any) -> StepSplit:
        split = super()._split(common, metadata)
        first, start = metadata.num_decodes, metadata.num_decode_tokens
        spans = [span._replace(first=max(span.first, first), start=max(span.start, start)) for span in split.stock]
        return split._replace(stock=tuple(span for span in spans if span.first < span.last))

    def _part(self, common: Any) -> Any:
        saved = {name: getattr(self, name) for name in ("reorder_batch_threshold", "_prefill_backend")}
        try:
            # no decoding rows, and a prefill backend with the part's metadata
            self.reorder_batch_threshold, self._prefill_backend = 0, saved["_prefill_backend"].clone()
            return super()._part(common)
        finally:
            self.__dict__.update(saved)
