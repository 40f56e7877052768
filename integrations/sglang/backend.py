"""SGLang's attention backend "flexmask": a stock backend whose long prompts run sparse."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from flexmask.integrations.serving.attend import after_cached, attend
from flexmask.integrations.serving.layers import SparseLayer
from flexmask.integrations.serving.versions import check_release
from flexmask.integrations.sglang.options import KERNELS, KERNELS_RUN, serving_options
from flexmask.integrations.sglang.prefill import Prefill, refuse_model, refuse_server
from flexmask.integrations.sglang.requests import tell_requests
from flexmask.integrations.sglang.step import PROMPTS, Step, gathered, lengths_of
from flexmask.integrations.sglang.versions import RUN, interface_faults

_log = logging.getLogger("sglang.flexmask")


def make_backend(runner: Any) -> Any:
    """Make the backend of one of SGLang's ModelRunners; a draft model gets the stock backend.

    Raises
    ------
    ImportError
        For a release with other interfaces, or older than those that were run.
    TypeError, ValueError
        For wrong options, and for servers and models that are not served.
    """
    import sglang
    from sglang.srt.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    server, model = runner.server_args, runner.model_config
    options = serving_options(stock_kernel(server, str(runner.device)), model.hf_config)
    make_stock = ATTENTION_BACKENDS[options.kernel]
    if runner.is_draft_worker:
        return make_stock(runner)
    refuse_server(server, runner.use_mla_backend)
    refuse_model(runner.model, model.is_multimodal)
    options.settings.check_model(model.hf_text_config)
    stock = make_stock(runner)
    warning = check_release("SGLang", sglang.__version__, RUN, interface_faults(type(stock)))
    if warning is not None:
        _log.warning("%s", warning)
    if options.kernel not in KERNELS_RUN:
        _log.warning("flexmask was run with %s for everything else, not with %s", ", ".join(KERNELS_RUN), options.kernel)
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    prefill = Prefill(runner, options, rank, ranks)
    prefill.prepare(largest_call(runner), torch.device(runner.device), runner.dtype)
    if not prefill.sparse_layers:
        return stock
    tell_requests(prefill.chosen)
    # every stage of pipeline parallelism sees every token
    if rank == 0 and get_pp_group().is_first_rank and server.enable_metrics:
        prefill.counters.export()
    return sparse(stock, make_stock(runner), prefill)


def stock_kernel(server_args: Any, device: str) -> str:
    """The stock backend's name unless the options have one: the decode backend's if it is in `KERNELS`."""
    decoding = server_args.get_attention_backends()[1]
    if decoding in KERNELS:
        return str(decoding)
    return "torch_native" if device == "cpu" else "triton"


def largest_call(runner: Any) -> tuple[int, int]:
    """Rows and tokens of the largest call: the last chunk of the longest prompt that the model and its cache take."""
    chunk, longest = runner.server_args.chunked_prefill_size, min(runner.model_config.context_len, runner.max_total_num_tokens)
    return (min(chunk, longest) if chunk and chunk > 0 else longest), longest


def sparse(stock: Any, others: Any, prefill: Prefill) -> Any:
    """Make `stock` serve long prompts sparse; `others`, a second stock backend, serves the rest of such steps.

    The object stays, because parts of a backend refer to it.
    """
    base = type(stock)
    overridden = {name: vars(SparsePrefill)[name] for name in _OVERRIDDEN}
    # derived from one class: an object cannot become one of a class with several
    stock.__class__ = type(f"Sparse{base.__name__}", (base,), {"__module__": __name__, "flexmask_stock": base, **overridden})
    stock.flexmask, stock.flexmask_others, stock.flexmask_step = prefill, others, None
    return stock


class SparsePrefill:
    """Methods that override those of a stock backend's class."""

    flexmask: Prefill
    flexmask_stock: Any
    flexmask_others: Any
    flexmask_step: Step | None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the step, and make the metadata of all rows for layers that run stock."""
        self.flexmask_stock.init_forward_metadata(self, forward_batch)
        step = self.flexmask.step(forward_batch)
        if step is not None and step.stock_batch is not None:
            self.flexmask_others.init_forward_metadata(step.stock_batch)
        self.flexmask_step = step

    def init_forward_metadata_out_graph(self, forward_batch: Any, *arguments: Any, **options: Any) -> None:
        """Metadata of a step inside a CUDA graph, which runs stock."""
        self.flexmask_step = self.flexmask.uncounted = None
        self.flexmask_stock.init_forward_metadata_out_graph(self, forward_batch, *arguments, **options)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        """Attention of the prompts of one step; see the stock backend."""
        step, role = self.flexmask_step, self.flexmask.roles.get(layer, "a layer that is not the model's")
        if isinstance(role, SparseLayer) and forward_batch.forward_mode.name in PROMPTS:
            given = [name for name, value in options.items() if value is not None]
            if step is None:
                pass
            elif step.lengths != lengths_of(forward_batch):
                self.flexmask.counters.warn_once("layers get another batch than was planned")
            elif k is None or v is None:
                self.flexmask.counters.warn_once("layers get no keys and values")
            elif given:
                self.flexmask.counters.warn_once(f"layers are called with {', '.join(given)}")
            else:
                self.flexmask.count(is_sparse=True)
                qkv = (q, k, v)
                return attend_by_plan(self.flexmask, self.flexmask_others, step, role, qkv, layer, forward_batch, save_kv_cache)
            self.flexmask.count(is_sparse=False)
        return self.flexmask_stock.forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache, **options)


_OVERRIDDEN = ("init_forward_metadata", "init_forward_metadata_out_graph", "forward_extend")


def attend_by_plan(
    prefill: Prefill,
    others: Any,
    step: Step,
    role: SparseLayer,
    qkv: tuple[Tensor, Tensor, Tensor],
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
) -> Tensor:
    """Attention of one layer in a step with sparse requests.

    `qkv` are the step's queries, keys and values as the layer got them; the output has the shape of the queries. Keys and values
    go to the cache unless another kernel wrote them, with ``save_kv_cache=False``.
    """
    q, k, v = qkv
    query = q.reshape(-1, role.num_heads, role.head_dim)
    key, value = (x.reshape(-1, role.num_kv_heads, role.head_dim) for x in (k, v))
    # of SGLang's, where it calls layers between pieces of a graph
    out = getattr(forward_batch, "_attn_output", None)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    by_head = out.view(query.shape)
    if step.stock_rows is not None:
        rows = step.stock_rows
        stock_out = others.forward_extend(q[rows], k[rows], v[rows], layer, step.stock_batch, save_kv_cache)
        by_head[rows] = stock_out.view(-1, *query.shape[1:])
    pool, counted, scales = prefill.pool, prefill.options.count_density, prefill.scales(layer)
    for request, slots in zip(step.plan.sparse, step.slots, strict=True):
        chunk = slice(request.start, request.stop)
        if save_kv_cache:
            # the pool divides by scales in place
            written = (x[chunk] if scales is None else x[chunk].clone() for x in (key, value))
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc[chunk], *written, *(scales or ()))
        reads = (pool.get_key_buffer, pool.get_value_buffer)
        cached = (None if slots is None else gathered(read(layer.layer_id), slots) for read in reads)
        keys, values = map(after_cached, cached, (key[chunk], value[chunk]), scales or (None, None))
        by_head[chunk], density = attend(role.with_gamma(request.gamma), query[chunk], keys, values, None, counted)
        if density is not None and not prefill.is_dummy:
            prefill.counters.add_density(density, request.stop - request.start, request.seq_len)
    by_head[step.rows :] = 0  # padding
    return out
