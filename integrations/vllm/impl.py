"""The attention implementation: the engine's own, with the long prefills of sparse layers taken out."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from vllm.compilation import backends
from vllm.config import get_current_vllm_config

from flexmask.integrations.vllm.attend import attend
from flexmask.integrations.vllm.counters import COUNTERS
from flexmask.integrations.vllm.engine import DRAFT, engine_of
from flexmask.integrations.vllm.layers import SparseLayer
from flexmask.integrations.vllm.pages import Places, gathered
from flexmask.integrations.vllm.step import SparseStep


class SparsePrefillImpl:
    """Mixin before a stock implementation; by the step's plan, rows go to flexmask or to ``super().forward``."""

    flexmask_kernel = ""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        config = get_current_vllm_config()
        self._engine = engine_of(config)
        # vLLM tags what it loads; a draft model's layers may come under the target's own configuration
        is_draft = backends.model_tag == "draft_model" or backends.model_tag.endswith("_head")
        self._model = DRAFT if is_draft else config.model_config.model
        self._role: SparseLayer | str | None = None
        own: Any = super()
        signature = inspect.signature(own.__init__)
        bound = signature.bind(*arguments, **options).arguments
        more = next((name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD), None)
        self._given = {**bound, **bound.pop(more, {})} if more else dict(bound)
        self._defaults = {name: each.default for name, each in signature.parameters.items()}

    def flexmask_role(self, name: str) -> SparseLayer | str:
        """The role of the layer that this implementation serves, by the layer's name."""
        if self._role is None:
            self._role = self._engine.role_of(name, self._model, self._given, self._defaults)
        return self._role

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Report that output is not quantized here: sparse rows are written as they come."""
        return False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of one step; see the stock implementation."""
        stock: Any = super()
        scales = (output_scale, output_block_scale)
        if attn_metadata is None:  # memory is measured, or the model is compiled
            self._engine.prepare(query.device, in_profile=True)
            return stock.forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        step: SparseStep | None = getattr(attn_metadata, "flexmask_step", None)
        role = self.flexmask_role(layer.layer_name)
        if step is not None and self._engine.counting == layer.layer_name:
            self._engine.count(step.plan)
        if step is None or not step.plan.sparse or isinstance(role, str):
            return stock.forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        for run, metadata in zip(step.plan.stock, step.stock, strict=True):
            rows = slice(run.start, run.stop)
            stock.forward(layer, query[rows], key[rows], value[rows], kv_cache, metadata, output[rows], *scales)
        counts = self._engine.options.count_density
        sinks = getattr(self, "sinks", None)
        # a parameter is no tensor of inference mode, and what is compiled for one kind is not for the other
        sinks = None if sinks is None else sinks.clone()
        for each, places in zip(step.plan.sparse, step.places, strict=True):
            rows = slice(each.start, each.stop)
            if each.tokens == each.stop - each.start:  # the first chunk: the step's own rows are all there is
                keys, values = (x[rows].transpose(0, 1).contiguous() for x in (key, value))
            else:
                keys, values = self.flexmask_gather(layer, kv_cache, places)
            out, density = attend(role, query[rows], keys, values, sinks, counts)
            output[rows] = out
            if density is not None:
                COUNTERS.add_density(density, each.stop - each.start)
        return output

    def flexmask_gather(self, layer: Any, kv_cache: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Keys and values of one request, this step's included: they are in the cache before attention runs."""
        return gathered(kv_cache, places, self._given["head_size"])
