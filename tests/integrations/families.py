"""Tiny random models of every family, with heads of one shape, which share kernels."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCABULARY = 96  # even, for two processes to share
NUM_LAYERS = 2
WINDOW = 200
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


@dataclass(frozen=True)
class Family:
    """A family's classes by name and its options; its models have `dense`, transformers' implementation to compare with."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    dense: str = "sdpa"
    config: str = "{}Config"
    note: str = ""

    @property
    def available(self) -> bool:
        return self.name in _AVAILABLE

    def sliding_layers(self) -> tuple[int, ...]:
        if not self.options.get("sliding_window"):
            return ()
        kinds = self.options.get("layer_types", ["sliding_attention"] * NUM_LAYERS)
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")

    def make(self, seed: int = 0, **options: Any) -> Any:
        """A model half of whose query heads attend sharply, the others nearly evenly."""
        torch.manual_seed(seed)
        options = {**SIZES, "attn_implementation": self.dense, **self.options, **options}
        config = getattr(transformers, self.config.format(self.name))(**options)
        model = getattr(transformers, f"{self.name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for layer in model.model.layers:
                _sharpen(layer.self_attn)
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):
                    parameter.normal_(0, 2)
        return model


def _sharpen(attention: torch.nn.Module) -> None:
    queries, keys = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    parameters = dict(attention.named_parameters())
    if "qkv_proj.weight" in parameters:  # queries, keys and values in one
        query, key, _ = parameters["qkv_proj.weight"].split([queries, keys, keys])
    else:
        query, key = parameters["q_proj.weight"], parameters["k_proj.weight"]
    strengths = (4.0, 40.0)
    if "q_norm.weight" in parameters:
        # the norm undoes a scale of its rows, except where they are small next to its epsilon
        parameters["q_norm.weight"].add_(4)
        strengths = (1e-3, 1.0)
    else:
        key *= 8
    for heads, strength in zip(query.split(queries // 2), strengths, strict=True):
        heads *= strength


FAMILIES = {
    family.name: family
    for family in (
        Family("Llama", note="also Yi, whose models are Llama's"),
        Family("Qwen2", {"use_sliding_window": False}),
        Family("Qwen3"),
        Family(
            "Qwen3Moe",
            {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "norm_topk_prob": True},
        ),
        Family("Mistral", {"sliding_window": WINDOW}, note="sliding window"),
        Family("Gemma2", {**_MIXED, "query_pre_attn_scalar": 16}, "eager", note="soft cap; every other layer has a window"),
        Family("Gemma3", {**_MIXED, "query_pre_attn_scalar": 16}, config="{}TextConfig", note="text; layers with a window"),
        Family("Glm", note="GLM-4-9B, the paper's"),
        Family("Glm4", {"partial_rotary_factor": 0.5}, note="GLM-4-0414"),
        Family("Phi3", {"sliding_window": None}),
        Family("GptOss", {**_MIXED, **_EXPERTS, "num_local_experts": 4}, "eager", note="sinks; every other layer has a window"),
    )
}
# imported before anything is compiled: later classes would make torch compile everything again
_AVAILABLE = frozenset(name for name in FAMILIES if hasattr(transformers, f"{name}ForCausalLM"))
