"""One model of an SGLang process: refused servers, the role of every attention layer, memory, the split of each step."""

from __future__ import annotations

import logging
import os
from itertools import accumulate
from operator import add
from typing import Any

import torch

from flexmask.integrations.serving.engine import Engine
from flexmask.integrations.serving.layers import Stock, role_of_shape
from flexmask.integrations.serving.options import RequestOptions, ServingOptions, decoded_options
from flexmask.integrations.serving.split import StepRequests, StepSplit
from flexmask.integrations.serving.startup import peak_memory_of
from flexmask.integrations.sglang.layers import FP8, layer_reason, shape_of
from flexmask.integrations.sglang.registration import NAME
from flexmask.integrations.sglang.step import PROMPTS, Step, lengths_of, step_of, step_reason

_log = logging.getLogger("sglang.flexmask")
# options of servers that are refused: the plug-in does not support how they run, or has not been tested with them
REFUSED = {
    "enable_dp_attention": "data-parallel attention",
    "enable_two_batch_overlap": "two-batch overlap",
    "enable_pdmux": "PD multiplexing",
    "enable_deterministic_inference": "deterministic inference, because the blocks that a row keeps depend on its chunk",
    "enable_hierarchical_cache": "a hierarchical cache",
    "enable_lmcache": "LMCache",
    "enable_lora": "LoRA adapters",
    "enable_memory_saver": "the memory saver (sleep mode)",
    "speculative_algorithm": "speculative decoding",
    "disaggregation_mode": "prefill/decode disaggregation",
}
MUST_BE_ONE = ("attn_cp_size", "dcp_size")


def refuse_server(server_args: Any, uses_mla: bool) -> None:
    """Raise ValueError for a server with an option that flexmask refuses, and name the option."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    if uses_mla:
        raise ValueError(f"the attention backend {NAME!r} does not support multi-head latent attention (MLA)")
    if attention_backends_of(server_args)[1] == NAME:
        raise ValueError(f"--decode-attention-backend must not be {NAME!r}, which only prefills; got it for prefill and decoding")
    for name, feature in REFUSED.items():
        if getattr(server_args, name) not in (None, False, "null"):
            raise ValueError(f"{name} must be off with the attention backend {NAME!r}, which does not support {feature}")
    prefill = getattr(getattr(server_args, "cuda_graph_config", None), "prefill", None)
    if getattr(prefill, "backend", None) == "full":
        raise ValueError(
            f"cuda_graph_config must not have the backend 'full' for prefill with the attention backend {NAME!r}: such "
            "graphs hold the stock kernel"
        )
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() not in ("", "0", "false"):
        raise ValueError(
            f"SGLANG_RUST_SERVER must be off with the attention backend {NAME!r}, which cannot read requests that pass through it"
        )
    for name in MUST_BE_ONE:
        size = getattr(server_args, name) or 1
        if size > 1:
            raise ValueError(
                f"{name} must be 1 with the attention backend {NAME!r}, whose masks need all of a prompt; got {size}"
            )


def refuse_model(model: Any, is_multimodal: bool) -> None:
    """Raise ValueError for a model whose image tokens see later ones, which only SGLang's Triton backend supports."""
    if is_multimodal and hasattr(model, "prepare_attn_masks"):
        raise ValueError(
            f"--enable-multimodal must be off with the attention backend {NAME!r} and {type(model).__name__}, whose images see "
            "later tokens"
        )


class SGLangEngine(Engine):
    """One model of an SGLang process; `runner` is its ModelRunner, with model and cache, `rank` is the tensor-parallel rank."""

    def __init__(self, runner: Any, options: ServingOptions, rank: int = 0, ranks: int = 1) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        super().__init__(options, _log)
        self.pool = runner.token_to_kv_pool
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.options_by_id: dict[str, RequestOptions] = {}  # by request of the batch, if it has some
        self.prompt_lens_by_id: dict[str, int] = {}  # tokens, by request of the batch
        self.step: Step | None = None  # the current step; None: all of it runs stock
        self.split_to_count: StepSplit | None = None  # None for dummy steps, before the first request
        # makes the plan of a batch's slots, which stock kernels read
        self._translator = runner.kv_index_translator
        self._is_first = rank == 0
        self._reserved: torch.Tensor | None = None
        for layer in runner.model.modules():
            if isinstance(layer, RadixAttention):
                reason = layer_reason(layer, self.pool, runner.dtype)
                arguments = (shape_of(layer), layer.layer_id, options.settings, rank, ranks)
                self.roles[layer] = role_of_shape(*arguments) if reason is None else Stock(reason)

    def prepare(self, largest: tuple[int, int], device: torch.device, dtype: torch.dtype, exports: bool = False) -> None:
        """Log the roles, compile, and on a GPU reserve the memory of the largest call until the first request."""
        from sglang.srt.utils import DynamicGradMode

        # SGLang's steps run in this grad mode, and would not use what another mode compiles
        with DynamicGradMode():
            try:
                self.start(largest, device, dtype, self.options.kernel, is_first=self._is_first, exports=exports)
                if device.type == "cuda" and self.sparse_layers:
                    needed = peak_memory_of(lambda: self.reserve(largest, device, dtype), device)
                    torch.cuda.empty_cache()
                    self._reserved = torch.empty(needed, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError as error:
                raise RuntimeError(
                    f"flexmask: a chunk of {largest[0]} rows at the end of {largest[1]} tokens needs more memory than "
                    "--mem-fraction-static leaves; lower it, --chunked-prefill-size or --context-length"
                ) from error

    def begin_step(self, forward_batch: Any = None) -> None:
        """Split one step; a step without a batch is neither split nor counted."""
        self.step = self.split_to_count = None
        if forward_batch is None:
            return
        is_dummy = forward_batch.rids is None
        if not is_dummy:
            self._reserved = None
        if forward_batch.forward_mode.name not in PROMPTS:
            return
        # without lengths the step counts as one request, which runs stock
        lengths = lengths_of(forward_batch) or ([forward_batch.extend_num_tokens or 0], [0])
        rows, cached = lengths
        reason = None if is_dummy else step_reason(forward_batch)
        ids, seq_lens = forward_batch.rids or (), [*map(add, rows, cached)]
        options = [self.options_by_id.get(name) for name in ids]
        prompt_lens = [max(self.prompt_lens_by_id.get(name, 0), so_far) for name, so_far in zip(ids, seq_lens, strict=False)]
        requests = StepRequests([0, *accumulate(rows)], seq_lens, options=options, prompt_lens=prompt_lens)
        split = self.split(requests, reason)
        self.split_to_count = None if is_dummy else split
        if split.sparse:
            self.step = step_of(forward_batch, split, lengths, self.req_to_token)
            part = self.step.stock_batch
            if part is not None:
                self._translator.own_plan(part).bind(part, self._translator)

    def scales(self, layer: Any) -> tuple[Any, Any] | None:
        """The scales that divide keys and values in the stock kernel's FP8 cache, tensors or floats; None without division."""
        if self.pool.dtype not in FP8 or self.options.kernel == "torch_native":
            return None
        scales = (layer.k_scale, layer.v_scale)
        return None if any(scale is None for scale in scales) else scales


def follow_requests(options_by_id: dict[str, RequestOptions], prompt_lens_by_id: dict[str, int]) -> None:
    """Make SGLang's scheduler fill both dicts for each batch with the options and prompt lengths of its requests, by id."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    def note_requests(forward_batch: Any, cls: Any, batch: Any, *_: Any, **__: Any) -> None:
        options_by_id.clear()
        prompt_lens_by_id.clear()
        for request in batch.reqs or ():
            prompt_lens_by_id[request.rid] = len(request.origin_input_ids)
            options = decoded_options(request.sampling_params.custom_params)
            if options is not None:
                options_by_id[request.rid] = options

    HookRegistry.register("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", note_requests)
    HookRegistry.apply_hooks()
