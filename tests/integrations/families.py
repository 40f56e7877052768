"""Tiny random models of every family that the adapter is tested on, all with heads of one shape, so that kernels are shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCABULARY = 97
NUM_LAYERS = 2
WINDOW = 200
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Family:
    """A family's classes by name, and the options of its configuration that matter to attention.

    `dense` is the implementation of transformers that the results are compared with: SDPA, or eager where SDPA cannot.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    dense: str = "sdpa"
    config: str = "{}Config"

    def available(self) -> bool:
        """Whether the installed transformers has the family."""
        return hasattr(transformers, f"{self.name}ForCausalLM")

    def make(self, seed: int = 0, **options: Any) -> Any:
        """A model whose heads attend unevenly: large query and key weights make sharp attention."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config.format(self.name))(**{**_SIZES, **self.options, **options})
        model = getattr(transformers, f"{self.name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for layer in model.model.layers:
                _sharpen(layer.self_attn)
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):
                    parameter.normal_(0, 2)
        return model


def _sharpen(attention: torch.nn.Module) -> None:
    """Half of the query heads attend sharply, the others nearly evenly."""
    strengths = torch.tensor([4.0, 4.0, 40.0, 40.0]).repeat_interleave(16)
    if hasattr(attention, "qkv_proj"):  # Phi-3: queries, keys and values in one
        weight = attention.qkv_proj.weight
        weight[:64] *= strengths[:, None]
        weight[64:96] *= 8
    elif hasattr(attention, "q_norm"):  # normed heads: the norm's weights, which all heads share
        attention.q_norm.weight.mul_(3).add_(2)
        attention.q_proj.weight *= strengths[:, None]
    else:
        attention.q_proj.weight *= strengths[:, None]
        attention.k_proj.weight *= 8


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    family.name: family
    for family in (
        Family("Llama"),  # Yi's models are Llama's
        Family("Qwen2", {"use_sliding_window": False}),
        Family("Qwen3"),
        Family("Qwen3Moe", {**_EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": True}),
        Family("Mistral", {"sliding_window": WINDOW}),
        Family("Gemma2", {**_MIXED, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}, dense="eager"),
        Family("Gemma3", {**_MIXED, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}, config="{}TextConfig"),
        Family("Glm4", {"partial_rotary_factor": 0.5}),
        Family("Phi3", {"sliding_window": None}),
        Family(
            "GptOss",
            {**_MIXED, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
            dense="eager",
        ),
    )
}
