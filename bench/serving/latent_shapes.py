"""Shapes of models with multi-head latent attention, without experts: what a prefill of the attention layers sees."""

from __future__ import annotations

from typing import Any

# sizes of DeepSeek-V3's own config.json; every layer has the dense feed-forward network of its first three
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3-dense": (
        "DeepseekV3",
        {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 4,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "vocab_size": 129280,
            "max_position_embeddings": 131072 + 256,
        },
    ),
}
