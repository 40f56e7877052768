"""One model of an SGLang process: the options, the role of every attention layer, the counters, and the plan of each step."""

from __future__ import annotations

import logging
from typing import Any

import torch

from flexmask.integrations.serving.counters import Counters
from flexmask.integrations.serving.layers import SparseLayer
from flexmask.integrations.serving.options import ServingOptions
from flexmask.integrations.serving.plan import StepPlan
from flexmask.integrations.serving.requests import RequestOptions
from flexmask.integrations.serving.startup import bytes_of, reserve, roles_line, served_roles, warm_up
from flexmask.integrations.sglang.layers import FP8, role_of_layer
from flexmask.integrations.sglang.options import NAME
from flexmask.integrations.sglang.step import Step, plan_batch, step_of, stock_reason

_log = logging.getLogger("sglang.flexmask")
# options of the server under which nothing is served: how it runs then is not what the plug-in stands on, or was not run
REFUSED = {
    "enable_dp_attention": "attention that is parallel over data",
    "enable_two_batch_overlap": "overlap of two batches",
    "enable_pdmux": "multiplexed prefill and decoding",
    "enable_deterministic_inference": "answers that depend on no chunk, as a row's blocks do",
    "enable_hierarchical_cache": "a hierarchical cache",
    "enable_lmcache": "LMCache",
}
MUST_BE_ONE = ("attn_cp_size", "dcp_size")


def refuse_server(server_args: Any, uses_mla: bool) -> None:
    """Raise ValueError for a server that is not served at all, by name."""
    if uses_mla:
        raise ValueError(f"the attention backend {NAME!r} does not serve multi-head latent attention (MLA)")
    decoding = server_args.get_attention_backends()[1]
    if decoding == NAME:
        raise ValueError(f"{NAME!r} must be the --prefill-attention-backend, beside another for decoding; got it for both")
    for name, feature in REFUSED.items():
        if getattr(server_args, name):
            raise ValueError(f"{name} must be off with the attention backend {NAME!r}, which does not serve {feature}")
    for name in MUST_BE_ONE:
        size = getattr(server_args, name) or 1
        if size > 1:
            raise ValueError(
                f"{name} must be 1 with the attention backend {NAME!r}, whose masks need all of a prompt; got {size}"
            )


def refuse_model(model: Any, is_multimodal: bool) -> None:
    """Raise ValueError for a model whose image tokens see later ones, which SGLang serves with its Triton backend only."""
    if is_multimodal and hasattr(model, "prepare_attn_masks"):
        raise ValueError(
            f"--enable-multimodal must be off with the attention backend {NAME!r} and {type(model).__name__}, whose images see "
            "later tokens"
        )


class Prefill:
    """Options and roles that the layers of one model share in this process.

    Parameters
    ----------
    runner
        SGLang's ModelRunner, its model and its cache made.
    options
        Read and checked.
    rank, ranks
        Of the tensor-parallel group.

    Raises
    ------
    TypeError, ValueError
        For options by head or by layer that do not fit the model.
    """

    def __init__(self, runner: Any, options: ServingOptions, rank: int = 0, ranks: int = 1) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        self.options = options
        self.pool = runner.token_to_kv_pool
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.counters = Counters()
        self.chosen: dict[str, RequestOptions] = {}
        """Options of the requests of a batch that have some, by id"""
        self.uncounted: StepPlan | None = None
        """The plan of a step until its first layer runs"""
        self.is_dummy = False
        """True in a step without requests, as SGLang makes them before the first one: nothing of it is counted"""
        self._policy = options.policy
        self._first = rank == 0
        self._held: torch.Tensor | None = None
        self.roles: dict[Any, SparseLayer | str] = {
            layer: role_of_layer(layer, self.pool, options.settings, runner.dtype, rank, ranks)
            for layer in runner.model.modules()
            if isinstance(layer, RadixAttention)
        }

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """Roles of the layers that prefill sparse."""
        return [role for role in self.roles.values() if isinstance(role, SparseLayer)]

    def prepare(self, largest: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
        """Log the roles, compile, and on a GPU make the largest call, a chunk of so many rows at the end of so many tokens.

        SGLang captures its graphs afterwards. The memory of the call is held until the first request.
        """
        self.roles = served_roles(self.roles, self._policy, largest)
        if self._first:
            by_name = {str(number): role for number, role in enumerate(self.roles.values())}
            _log.info("%s", roles_line(by_name, self.options, self.options.kernel))
        layers, density = self.sparse_layers, self.options.count_density
        if not layers:
            return
        from sglang.srt.utils import DynamicGradMode

        # as SGLang runs its steps: what is compiled in another mode is not used
        with DynamicGradMode():
            try:
                seconds = warm_up(layers, largest, device, dtype, density)
                if device.type == "cuda":
                    needed = bytes_of(lambda: reserve(layers, largest, device, dtype, density), device)
                    torch.cuda.empty_cache()
                    self._held = torch.empty(needed, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError as error:
                raise RuntimeError(
                    f"flexmask: a chunk of {largest[0]} rows at the end of {largest[1]} tokens needs more memory than "
                    "--mem-fraction-static leaves; lower it, --chunked-prefill-size or --context-length"
                ) from error
        if self._first:
            _log.info("flexmask: kernels compiled in %.1f s", seconds)
            self.counters.log_to(_log, self.options.log_every)

    def step(self, forward_batch: Any) -> Step | None:
        """Plan one step; None: all of it runs stock."""
        plan = plan_batch(forward_batch, self._policy, self.chosen)
        self.is_dummy = forward_batch.rids is None
        self.uncounted = None if self.is_dummy else plan
        if not self.is_dummy:
            self._held = None
            reason = None if plan is None else stock_reason(forward_batch)
            if reason is not None:
                self.counters.warn_once(reason)
        return step_of(forward_batch, plan, self.req_to_token) if plan is not None and plan.sparse else None

    def scales(self, layer: Any) -> tuple[Any, Any] | None:
        """Divisors of a layer's keys and values in the stock kernel's FP8 cache, tensors or floats; None: not divided."""
        if self.pool.dtype not in FP8 or self.options.kernel == "torch_native":
            return None
        scales = (layer.k_scale, layer.v_scale)
        return None if any(each is None for each in scales) else scales

    def count(self, is_sparse: bool) -> None:
        """Count the prompts of a step, by its plan or all of them as dense; to be called by every layer, the first counts."""
        plan, self.uncounted = self.uncounted, None
        if plan is not None:
            sparse = plan.sparse_tokens if is_sparse else 0
            self.counters.add_step(sparse, plan.sparse_tokens + plan.dense_tokens - sparse)
