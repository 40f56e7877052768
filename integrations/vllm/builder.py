"""The metadata builder, which also splits each step for `impl`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

from flexmask.integrations.serving.chunk import SparseRequest
from flexmask.integrations.serving.engine import StockBase
from flexmask.integrations.serving.layers import SparseLayer
from flexmask.integrations.serving.split import StepRequests, StepSplit, StockSpan
from flexmask.integrations.vllm.engine import VLLMEngine, engine_of, follow_requests
from flexmask.integrations.vllm.pages import PageTable


class Step(NamedTuple):
    """One step of vLLM's scheduler: its split, and for each part the rows, as `impl` numbers them, with metadata or pages."""

    split: StepSplit
    stock: tuple[tuple[slice, Any], ...]  # with the metadata of these rows
    sparse: tuple[tuple[slice, SparseRequest, PageTable | None], ...]  # with the pages of its cached tokens, None without any


class Splitter:
    """Splits the steps of one builder's layers: the attribute ``flexmask`` of the builder."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = engine
        self.policy = engine.options.policy  # latent attention replaces it

    def split(self, common: Any) -> StepSplit:
        num_reqs = common.num_reqs
        if common.max_query_len < self.policy.min_rows:  # as when all decode: no request is read by itself
            rows = common.query_start_loc_cpu[: num_reqs + 1].diff()
            prefills = rows > 1 if common.is_prefilling is None else common.is_prefilling[:num_reqs]
            # requests that pad the batch for a CUDA graph have no rows, and may have no entry in is_prefilling
            prefill_rows = rows[: len(prefills)][prefills]
            return StepSplit((), (StockSpan(0, num_reqs, 0, int(rows.sum())),), 0, int(prefill_rows.sum()))
        starts = common.query_start_loc_cpu[: num_reqs + 1].tolist()
        host_fields = (common.seq_lens_cpu_upper_bound, common.is_prefilling)
        seq_lens, is_prefilling = (None if numbers is None else numbers[:num_reqs].tolist() for numbers in host_fields)
        requests = StepRequests(starts, seq_lens, is_prefilling, self.engine.options_in_step, self.engine.prompt_lens)
        return self.engine.split(requests, step_reason(common), self.policy)


def step_reason(common: Any) -> str | None:
    """Return why all rows of a step run stock, or None."""
    if common.causal is not True:
        return "attention of a step is not causal"
    if common.seq_lens_cpu_upper_bound is None:
        return "the host has no lengths of a step"
    # requests without images have an empty list
    return "a step has images that see later tokens" if any((common.mm_req_doc_ranges or {}).values()) else None


class SparsePrefillBuilder(StockBase):  # type: ignore[misc]
    """Mixin before a stock builder; its metadata carries the split step as ``flexmask_step``, without which layers run stock."""

    # an updated block table would not reach the metadata of the parts
    supports_update_block_table = False
    flexmask_own: type | None = None  # this class, not one that vLLM derives from it
    flexmask: Splitter | None = None  # None: metadata without a split

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **options: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **options)
        engine = engine_of(vllm_config)
        engine.prepare(device, in_profile=False)
        if any(isinstance(engine.roles.get(name), SparseLayer) for name in layer_names):
            # vLLM's subclasses rewrite the batch (chunked local attention, fast prefill)
            if type(self) is self.flexmask_own:
                self.flexmask = Splitter(engine)
            else:
                engine.counters.warn_once(
                    f"{type(self).__name__} rewrites the batch, as for chunked local attention, so layers do not see the "
                    "scheduler's requests"
                )
        follow_requests(vllm_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """The stock support, at most for graphs of uniform decoding batches."""
        stock = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(stock, AttentionCGSupport.UNIFORM_BATCH, key=lambda support: support.value)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        with self.flexmask_off():
            return super().build_for_cudagraph_capture(common_attn_metadata)

    def build_for_drafting(self, *arguments: Any, **options: Any) -> Any:
        """Metadata without a split: the model verifies the draft's tokens."""
        with self.flexmask_off():
            return super().build_for_drafting(*arguments, **options)

    @contextmanager
    def flexmask_off(self) -> Iterator[None]:
        """Split nothing inside this context, where stock functions call `build`."""
        splitter = self.flexmask
        try:
            self.flexmask = None
            yield
        finally:
            self.flexmask = splitter

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.flexmask is not None:
            split = self.flexmask.split(common_attn_metadata)
            metadata.flexmask_step = self.flexmask_step_of(split, common_attn_metadata, *self.flexmask_decoding(metadata))
        return metadata

    def flexmask_decoding(self, metadata: Any) -> tuple[int, int]:
        """Number of requests and of rows at the beginning of the step that get metadata and kernels of their own."""
        return 0, 0

    def flexmask_part(self, common: Any) -> Any:
        """Metadata for a part of the step's requests."""
        # with fast_build, because the only buffer for an ahead-of-time schedule (FA3) belongs to the metadata of all rows
        return super().build(0, common, True)

    def flexmask_step_of(self, split: StepSplit, common: Any, first: int, first_row: int) -> Step:
        """The step of a split; its stock part begins at request `first`, and rows count from `first_row`."""

        def rows(part: SparseRequest | StockSpan) -> slice:
            return slice(part.start - first_row, part.stop - first_row)

        remaining = [
            span._replace(first_request=max(span.first_request, first), start=max(span.start, first_row))
            for span in split.stock
            if span.end_request > first
        ]
        spans = remaining if split.sparse else []  # a stock step uses the metadata of all rows
        slices = [UBatchSlice(slice(span.first_request, span.end_request), slice(span.start, span.stop)) for span in spans]
        parts = map(self.flexmask_part, split_attn_metadata(slices, common) if slices else ())
        stock = tuple(zip(map(rows, spans), parts, strict=True))
        pages = common.block_table_tensor
        tables = (
            PageTable(pages[request.batch_index], request.cached_len) if request.cached_len else None for request in split.sparse
        )
        return Step(split, stock, tuple(zip(map(rows, split.sparse), split.sparse, tables, strict=True)))


class SparseLatentBuilder(SparsePrefillBuilder):
    """The builder's mixin for multi-head latent attention, whose decoding rows come first."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.flexmask is not None:
            # the stock backend decodes chunks of up to `reorder_batch_threshold` rows
            policy = self.flexmask.policy
            self.flexmask.policy = policy._replace(min_rows=max(policy.min_rows, self.reorder_batch_threshold + 1))

    def flexmask_decoding(self, metadata: Any) -> tuple[int, int]:
        return metadata.num_decodes, metadata.num_decode_tokens

    def flexmask_part(self, common: Any) -> Any:
        saved = {name: getattr(self, name) for name in ("reorder_batch_threshold", "_prefill_backend")}
        try:
            # a part has no decoding rows, and needs a prefill backend with its own metadata
            self.reorder_batch_threshold, self._prefill_backend = 0, saved["_prefill_backend"].clone()
            return super().flexmask_part(common)
        finally:
            self.__dict__.update(saved)
