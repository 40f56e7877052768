"""One engine process: refused servers, the role of every attention layer, work before the first request."""

from __future__ import annotations

import logging
import os
import pkgutil
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch

from flexmask._torch import HAS_TRITON
from flexmask.integrations.serving.engine import Engine
from flexmask.integrations.serving.layers import Role, SparseLayer, Stock, role_of_shape
from flexmask.integrations.serving.options import RequestOptions, decoded_options
from flexmask.integrations.serving.split import StepSplit
from flexmask.integrations.serving.versions import faults_in
from flexmask.integrations.vllm.layers import layer_index, layer_reason, shape_of
from flexmask.integrations.vllm.options import serving_options
from flexmask.integrations.vllm.registration import wrap_once

if HAS_TRITON:
    from flexmask.integrations.vllm import pages_kernel

# vLLM shows only loggers below its own
_log = logging.getLogger("vllm.flexmask")
_LOCK = threading.RLock()
DRAFT = "a draft model's"
_WARM_UP = ("_warmup_", "_v2_mixed_warmup")  # how the ids of vLLM's own warm-up requests begin


def refuse_server(vllm_config: Any) -> None:
    """Raise ValueError for a server with an option that flexmask refuses, and name the option."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name)
        if size > 1:
            raise ValueError(f"{name} must be 1 with flexmask, whose masks need all of a prompt; got {size}")
    untested = {"--enable-sleep-mode": model.enable_sleep_mode, "--enable-dbo (or --ubatch-size)": parallel.use_ubatching}
    for name, is_on in untested.items():
        if is_on:
            raise ValueError(f"{name} must be off with flexmask, which has not been tested with it")
    if getattr(model, "original_max_model_len", None) == -1:
        raise ValueError("--max-model-len must be a number with flexmask, which reserves memory for such a prompt; got -1")
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        raise ValueError("VLLM_BATCH_INVARIANT must be off with flexmask: a row's blocks depend on the chunk that it comes in")
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0").lower() not in ("", "0", "false"):
        raise ValueError("VLLM_USE_RUST_FRONTEND must be off with flexmask, which cannot read requests that pass through it")


class VLLMEngine(Engine):
    """One engine in this process; TypeError or ValueError for wrong or unsupported options."""

    def __init__(self, vllm_config: Any) -> None:
        refuse_server(vllm_config)
        self._vllm_config, model = vllm_config, vllm_config.model_config
        super().__init__(serving_options(vllm_config.additional_config, model.hf_config), _log)
        self.options.settings.check_model(model.hf_text_config)
        self.dtype: torch.dtype = model.dtype
        self.layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
        self.options_in_step: list[RequestOptions | None] = []  # options of the requests of a step, in its order
        self.prompt_lens: Sequence[int] = ()  # tokens of their prompts
        self._options_by_id: dict[str, RequestOptions] = {}  # of the requests that have some, by id
        self._in_warm_up = False
        self._prepared = False

    def note_requests(
        self, new: Mapping[str, RequestOptions | None], order: Sequence[str], alive: Collection[str], prompt_lens: Sequence[int]
    ) -> None:
        """Note the options of new requests, and the order and prompt lengths of a step's; forget requests that have ended."""
        self.prompt_lens = prompt_lens
        known = {**self._options_by_id, **new}
        self._options_by_id = {name: options for name, options in known.items() if options is not None and name in alive}
        self.options_in_step = [self._options_by_id.get(name) for name in order]
        self._in_warm_up = bool(order) and all(name.startswith(_WARM_UP) for name in order)

    def count_step(self, role: SparseLayer, split: StepSplit, reason: str | None = None) -> None:
        if not self._in_warm_up:
            super().count_step(role, split, reason)

    def role_of(self, name: str, layer: Any) -> Role:
        """The role of one of vLLM's layers."""
        plugin, builder, index = layer.impl.flexmask, layer.attn_backend.get_builder_cls(), layer_index(name)
        target = self._vllm_config.model_config
        if not isinstance(layer, self.calling_layers()):
            return Stock(f"a layer of type {type(layer).__name__}, which calls the engine's kernels itself")
        # vLLM derives a builder for chunked local attention (Llama 4), which splits nothing
        if builder.flexmask_own is not builder:
            return Stock("its builder rewrites the batch (chunked local attention)")
        # a model's own draft layers continue its indices
        if plugin.model != target.model or (index is not None and index >= target.get_total_num_hidden_layers()):
            return Stock(DRAFT)
        if target.rswa_window is not None:
            return Stock("a window that leaves the prompt visible")
        reason = layer_reason(plugin.impl_args, self.dtype)
        if reason is not None or index is None:
            return Stock(reason or "no layer number in its name")
        return role_of_shape(shape_of(plugin.impl_args), index, self.options.settings, *_tensor_parallel_rank())

    def prepare(self, device: torch.device, in_profile: bool) -> None:
        """Once: assign and log the roles of all layers, compile, and with `in_profile` make the largest call."""
        from vllm.distributed import get_pp_group

        with _LOCK:
            if self._prepared:
                return
            self._prepared = True
            layers = {name: layer for name, layer in self.layers.items() if hasattr(getattr(layer, "impl", None), "flexmask")}
            for name, layer in layers.items():
                self.roles[name] = layer.impl.flexmask.role = self.role_of(name, layer)
            policy, most = self.options.policy, self._vllm_config.model_config.max_model_len
            latent = {layer.attn_backend.get_builder_cls() for layer in layers.values() if layer.attn_backend.is_mla()}
            policy = policy._replace(min_rows=max([policy.min_rows, *map(self._min_rows, latent)]))
            largest = min(self._vllm_config.scheduler_config.max_num_batched_tokens, most), most
            is_first, exports = _tensor_parallel_rank()[0] == 0, get_pp_group().is_first_rank
            kernel = ["", *(layer.impl.flexmask_kernel for layer in layers.values())][-1]
            with torch.inference_mode():
                self.start(largest, device, self.dtype, kernel, policy, is_first, exports)
                if device.type == "cuda":
                    self.compile_reader(device)
                if in_profile and device.type != "cpu":
                    self.reserve(largest, device, self.dtype)
            if is_first and self.sparse_layers:
                # processes of multiprocessing run no atexit
                Finalize(None, self.counters.log, exitpriority=100)

    def compile_reader(self, device: torch.device) -> None:
        """Compile the kernel that reads the cache, for the sparse layers whose keys are in it."""
        sparse = {name: role for name, role in self.roles.items() if isinstance(role, SparseLayer)}
        widths = [role.head_dim for name, role in sparse.items() if not self.layers[name].attn_backend.is_mla()]
        if HAS_TRITON:
            pages_kernel.compile_for(widths, self.dtype, device)

    def _min_rows(self, builder: Any) -> int:
        """The least rows that latent attention does not decode, by a builder without state. Speculative decoding raises it."""
        bare = builder.__new__(builder)
        bare.vllm_config = self._vllm_config
        bare._init_reorder_batch_threshold(builder.reorder_batch_threshold, builder.query_len_support.name != "SINGLE_ONLY")
        return int(bare.reorder_batch_threshold) + 1

    def calling_layers(self) -> tuple[type, ...]:
        """Types of layers that call their implementation; layers of a model's own file (Kimi Linear) may not."""
        from vllm.model_executor.layers.attention import Attention, MLAAttention

        return Attention, MLAAttention


def _tensor_parallel_rank() -> tuple[int, int]:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


# the engines of this process; weak, because layers and builders hold theirs. They find their engine by vLLM's configuration,
# which a draft model copies
_ENGINES: weakref.WeakSet[VLLMEngine] = weakref.WeakSet()


def engine_of(vllm_config: Any) -> VLLMEngine:
    """The engine of a configuration, made once. A draft model's copy shares the registry of layers and so the engine."""
    with _LOCK:
        engine = existing_engine(vllm_config)
        if engine is None:
            engine = VLLMEngine(vllm_config)
            _ENGINES.add(engine)
        return engine


def existing_engine(vllm_config: Any) -> VLLMEngine | None:
    """The engine of a configuration if it was made; a server without our backend has none."""
    layers = vllm_config.compilation_config.static_forward_context
    return next((engine for engine in _ENGINES if engine.layers is layers), None)


def follow_requests(vllm_config: Any) -> None:
    """Have vLLM's model runner call `VLLMEngine.note_requests` before each step; ImportError if its interfaces differ."""
    if vllm_config.use_v2_model_runner:
        prefix, function, lengths = "vllm.v1.worker.gpu.", "prepare_inputs", "prefill_len_np"
    else:
        prefix, function, lengths = "vllm.v1.worker.gpu_", "_update_states", "num_prompt_tokens"
    runner_path = f"{prefix}model_runner.GPUModelRunner"
    faults = faults_in({}, {f"{runner_path}.{function}": ("scheduler_output",), f"{prefix}input_batch.InputBatch": {lengths}})
    if faults:
        raise ImportError(f"flexmask does not support the model runner of this vLLM: {'; '.join(faults)}")

    def run_and_note(stock: Any, runner: Any, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        batch = stock(runner, scheduler_output, *arguments, **options)
        engine = existing_engine(runner.vllm_config)
        if engine is not None:
            new = {
                request.req_id: decoded_options(getattr(request.sampling_params, "extra_args", None))
                for request in scheduler_output.scheduled_new_reqs
            }
            if function == "prepare_inputs":
                step, alive = batch, runner.req_states.req_id_to_index
            else:
                step, alive = runner.input_batch, runner.requests
            engine.note_requests(new, step.req_ids, alive, getattr(step, lengths))
        return batch

    wrap_once(pkgutil.resolve_name(runner_path), function, run_and_note)
