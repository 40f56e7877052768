"""SGLang's attention backend "flexmask": a stock backend whose long prompts run sparse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexmask.integrations.serving.chunk import concat_cached
from flexmask.integrations.serving.engine import StockBase
from flexmask.integrations.serving.layers import SparseLayer
from flexmask.integrations.serving.versions import check_interfaces, refuse_older
from flexmask.integrations.sglang.engine import SGLangEngine, follow_requests, refuse_model, refuse_server
from flexmask.integrations.sglang.options import serving_options, stock_kernel
from flexmask.integrations.sglang.step import PROMPTS, Step, gathered, lengths_of
from flexmask.integrations.sglang.versions import interface_faults


def make_backend(runner: Any) -> Any:
    """The backend of one of SGLang's ModelRunners; ImportError, TypeError or ValueError for what flexmask does not support."""
    import sglang

    refuse_older("SGLang", sglang.__version__)
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    server, model = resolved_view(runner.server_args), runner.model_config
    options = serving_options(stock_kernel(attention_backends_of(server)[1], str(runner.device)), model.hf_config)
    refuse_server(server, runner.use_mla_backend)
    refuse_model(runner.model, model.is_multimodal)
    options.settings.check_model(model.hf_text_config)
    stock = ATTENTION_BACKENDS[options.kernel](runner)
    check_interfaces("SGLang", sglang.__version__, interface_faults(type(stock)))
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    engine = SGLangEngine(runner, options, rank, ranks)
    largest = largest_call(runner, server.chunked_prefill_size)
    exports = server.enable_metrics and parallel_state.get_pp_group().is_first_rank
    engine.prepare(largest, torch.device(runner.device), runner.dtype, exports)
    if not engine.sparse_layers:
        return stock
    follow_requests(engine.options_by_id, engine.prompt_lens_by_id)
    return sparse_backend(stock, runner, engine)


def largest_call(runner: Any, chunk: int | None) -> tuple[int, int]:
    """Rows, and tokens so far, of the largest call: the last chunk of the longest prompt that the model and its cache take."""
    longest = min(runner.model_config.context_len, runner.max_total_num_tokens)
    return (min(chunk, longest) if chunk and chunk > 0 else longest), longest


def sparse_backend(stock: Any, runner: Any, engine: SGLangEngine) -> Any:
    """A backend like `stock` that runs long prompts sparse; `stock` handles the other rows of such steps."""
    base = type(stock)
    return type(f"Sparse{base.__name__}", (SparsePrefill, base), {"__module__": __name__})(runner, engine, stock)


class SparsePrefill(StockBase):  # type: ignore[misc]
    """Mixin before a stock backend's class."""

    def __init__(self, runner: Any, engine: SGLangEngine, stock: Any) -> None:
        self.flexmask, self.flexmask_stock = engine, stock
        super().__init__(runner)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Split the step; make the metadata of all rows for layers that run stock, and that of the stock rows."""
        super().init_forward_metadata(forward_batch)
        self.flexmask.begin_step(forward_batch)
        step = self.flexmask.step
        if step is not None and step.stock_batch is not None:
            self.flexmask_stock.init_forward_metadata(step.stock_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, *arguments: Any, **options: Any) -> None:
        """Make the metadata of a step in a CUDA graph, which runs stock."""
        self.flexmask.begin_step()
        super().init_forward_metadata_out_graph(forward_batch, *arguments, **options)

    def forward_extend(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **options: Any
    ) -> Tensor:
        """Attention of a step's prompts, shaped as `q`; without `save_kv_cache` another kernel has already written the cache."""
        engine, step, stock = self.flexmask, self.flexmask.step, super().forward_extend
        role = engine.roles.get(layer)  # None: a layer that is not the model's
        if not isinstance(role, SparseLayer) or forward_batch.forward_mode.name not in PROMPTS:
            return stock(q, k, v, layer, forward_batch, save_kv_cache, **options)
        reason = None if step is None else call_reason(step, k, v, forward_batch, options)
        if engine.split_to_count is not None:
            engine.count_step(role, engine.split_to_count, reason)
        if step is None or reason is not None:
            return stock(q, k, v, layer, forward_batch, save_kv_cache, **options)
        query = q.reshape(-1, role.num_heads, role.head_dim)
        key, value = (rows.reshape(-1, role.num_kv_heads, role.head_dim) for rows in (k, v))
        # between the pieces of a graph SGLang has a buffer for the output
        out = getattr(forward_batch, "_attn_output", None)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        by_head = out.view(query.shape)
        if step.stock_rows is not None:
            rows = step.stock_rows
            stock_out = self.flexmask_stock.forward_extend(q[rows], k[rows], v[rows], layer, step.stock_batch, save_kv_cache)
            by_head[rows] = stock_out.view(-1, *query.shape[1:])
        scales = engine.scales(layer)
        for request, slots in step.sparse:
            chunk = (key[request.rows], value[request.rows])
            if save_kv_cache:
                # the pool divides by scales in place
                written = (tensor if scales is None else tensor.clone() for tensor in chunk)
                engine.pool.set_kv_buffer(layer, forward_batch.out_cache_loc[request.rows], *written, *(scales or ()))
            # keys and values have no name here, so that one request's are freed before the next one's are made
            engine.attend(
                role,
                request,
                query[request.rows],
                *keys_and_values(engine.pool, layer.layer_id, slots, chunk, scales),
                is_counted=engine.split_to_count is not None,
                out=by_head[request.rows],
            )
        by_head[step.num_rows :] = 0  # padding
        return out


def keys_and_values(
    pool: Any, layer_id: int, slots: Tensor | None, chunk: tuple[Tensor, Tensor], scales: tuple[Any, Any] | None
) -> tuple[Tensor, Tensor]:
    """Keys and values of all of a request's tokens. Gathered rows are freed before this returns."""
    both = []
    for read, own, scale in zip((pool.get_key_buffer, pool.get_value_buffer), chunk, scales or (None, None), strict=True):
        both.append(concat_cached(None if slots is None else gathered(read(layer_id), slots), own, scale))
    return both[0], both[1]


def call_reason(step: Step, k: Any, v: Any, forward_batch: Any, options: Mapping[str, Any]) -> str | None:
    """Return why a layer runs a split step stock, or None."""
    if step.lengths != lengths_of(forward_batch):
        return "layers get another batch than was split"
    if k is None or v is None:
        return "layers get no keys and values"
    names = [name for name, value in options.items() if value is not None]
    return f"layers are called with {', '.join(names)}" if names else None
